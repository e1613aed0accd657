"""Optimizers that Trainer makes by a factory.

They have the numbers of a plain loop, are resumed to the bit, and override nothing.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from hf_cases import llama, numbers_tokenizer, transformers
from optimizer_cases import frozen
from surgery_models import model_bits
from test_huggingface import Lines, losses
from torch import nn

import fp8manifold as fm
from fp8manifold import quantize_model
from fp8manifold.huggingface import trainer_optimizer

# What other libraries announce is their own business.
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 6


def quantised():
    return fm.quantize_model(llama(), "E4M3", "codes", tied="leave")


def settings(folder, micro_batches, **changes):
    logs = {
        "output_dir": str(folder),
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    steps = {
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "seed": 0,
        "use_cpu": True,
    }
    parts = {
        "gradient_accumulation_steps": micro_batches,
        "per_device_train_batch_size": 4 // micro_batches,
    }
    return {**logs, **steps, **parts, **changes}


def by_trainer(model, arguments, rule, resume=None, **options):
    passes = []
    hook = model.register_forward_pre_hook(
        lambda _, args, inputs: passes.append(dict(inputs)), with_kwargs=True
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Lines(),
        optimizer_cls_and_kwargs=trainer_optimizer(arguments, rule, **options),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    hook.remove()
    return trainer, passes


def by_hand(model, passes, optimizer, micro_batches, *, clips=True):
    schedule = transformers.get_scheduler("linear", optimizer, 0, STEPS)
    norms = []
    model.train()
    for i, inputs in enumerate(passes):
        loss = model(**inputs).loss
        (loss if "num_items_in_batch" in inputs else loss / micro_batches).backward()
        if (i + 1) % micro_batches:
            continue
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), 0.5 if clips else math.inf))
        )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


def made_by_hand(model, rule):
    if rule == "muon":
        return fm.optim.StiffnessMuon.for_model(
            model, 1e-2, weight_decay=0.0, betas=(0.9, 0.999), adam_eps=1e-8, moments="8bit"
        )
    decays = [(n, p) for n, p in model.named_parameters() if "norm" not in n]
    norms = [(n, p) for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    if rule == "adafactor":
        return fm.optim.StiffnessAdafactor(groups, 1e-2, momentum=0.9, moments="8bit")
    return fm.optim.StiffnessAdamW(groups, 1e-2, betas=(0.9, 0.999), eps=1e-8, moments="8bit")


IN_BACKWARD = {
    1: {"clip": "previous", "max_norm": 0.5, "first": "measure"},
    2: {"accumulate": "bfloat16"},
}


@pytest.mark.usefixtures("products")
@pytest.mark.covering(2)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("rule", ["adamw", "muon", "adafactor"])
def test_a_trainer_is_the_plain_loop_and_resumes_to_the_bit(
    rule, in_backward, micro_batches, tmp_path
):
    options = {"moments": "8bit", "in_backward": in_backward}
    if rule == "adafactor":
        options["momentum"] = 0.9
    decay = 0.0 if rule == "muon" else 0.1
    whole, plain, again = quantised(), quantised(), quantised()
    arguments = transformers.TrainingArguments(
        **settings(tmp_path / "whole", micro_batches, weight_decay=decay)
    )
    trainer, passes = by_trainer(whole, arguments, rule, **options)
    assert len(passes) == STEPS * micro_batches
    optimizer = made_by_hand(plain, rule)
    if in_backward:
        fm.optim.step_in_backward(optimizer, **IN_BACKWARD[micro_batches])
    norms = by_hand(plain, passes, optimizer, micro_batches)
    assert model_bits(whole) == model_bits(plain)
    assert model_bits(whole) != model_bits(quantised())
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert logged == norms
    assert max(norms) > 0.5
    saved = trainer.optimizer.state_dict()
    assert frozen(saved["state"]) == frozen(optimizer.state_dict()["state"])
    if in_backward and micro_batches == 1:
        assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS - 1}
        assert all(group["previous_norm"] > 0 for group in saved["param_groups"])
    resuming = transformers.TrainingArguments(
        **settings(tmp_path / "cut", micro_batches, weight_decay=decay)
    )
    resumed, _ = by_trainer(again, resuming, rule, tmp_path / "whole" / "checkpoint-3", **options)
    assert model_bits(again) == model_bits(whole)
    assert frozen(resumed.optimizer.state_dict()) == frozen(saved)
    assert losses(resumed)[-3:] == losses(trainer)[-3:]


@pytest.mark.usefixtures("products")
def test_without_clipping_norms_are_logged_and_no_step_is_missing(tmp_path):
    model, plain = quantised(), quantised()
    arguments = transformers.TrainingArguments(**settings(tmp_path, 1, max_grad_norm=0.0))
    trainer, passes = by_trainer(model, arguments, "muon", moments="8bit", in_backward=True)
    optimizer = made_by_hand(plain, "muon")
    norms = by_hand(plain, passes, optimizer, 1, clips=False)
    assert model_bits(model) == model_bits(plain)
    assert [
        entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry
    ] == norms
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {STEPS}


def test_a_last_step_of_fewer_micro_batches_is_a_step(tmp_path):
    """Forty lines in batches of four make ten passes, which three do not divide."""
    model = quantised()
    arguments = transformers.TrainingArguments(
        **settings(tmp_path, 2, max_steps=-1, num_train_epochs=1, save_strategy="no")
        | {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
    )
    trainer, passes = by_trainer(model, arguments, "adamw", in_backward=True)
    assert (len(passes), trainer.state.global_step) == (10, 4)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {4}


def preferences_trainer(model, folder, **options):
    """A DPOTrainer of TRL, whose first loss is log 2 where the reference is the model."""
    import datasets
    import trl

    lines = [{"prompt": "1 ", "chosen": "2 3", "rejected": "4"} for _ in range(8)]
    arguments = trl.DPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
    )
    return trl.DPOTrainer(
        model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=numbers_tokenizer(),
        **options,
    )


@pytest.mark.extra("trl", "datasets")
@pytest.mark.parametrize("kind", ["read", "quantised"])
def test_a_float_reference_of_a_quantised_model_is_refused(kind, tmp_path):
    import trl

    # TRL imports its trainers when they are asked for, and only those that are imported by
    # now are guarded.
    assert trl.DPOTrainer
    llama().save_pretrained(tmp_path / "floats")
    if kind == "read":
        model = fm.load(tmp_path / "floats", "E4M3", tied="leave")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
        quantize_model(model, "E4M3", tied="leave")
    with pytest.raises(ValueError, match="the reference would be read in float from"):
        preferences_trainer(model, tmp_path)


@pytest.mark.extra("trl", "datasets")
def test_a_float_model_beside_a_quantised_one_has_a_float_reference(tmp_path):
    llama().save_pretrained(tmp_path / "floats")
    model, quantised_model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "floats") for _ in range(2)
    )
    quantize_model(quantised_model, "E4M3", tied="leave")
    trainer = preferences_trainer(model, tmp_path)
    assert model_bits(trainer.ref_model) == model_bits(model)


@pytest.mark.extra("trl", "datasets")
@pytest.mark.parametrize("reference", ["copy", "folder"])
def test_the_reference_of_a_quantised_model_has_its_values(reference, tmp_path):
    """From a folder of its own as floats, which are the values of its codes."""
    model = quantize_model(llama(), "E4M3", tied="leave")
    options = {}
    if reference == "copy":
        options["ref_model"] = copy.deepcopy(model)
    else:
        model.save_pretrained(tmp_path / "codes")
        model.config._name_or_path = str(tmp_path / "codes")
    trainer = preferences_trainer(model, tmp_path, **options)
    expected = fm.dequantize_model(copy.deepcopy(model)).state_dict()
    values = fm.dequantize_model(copy.deepcopy(trainer.ref_model)).state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.extra("trl", "datasets")
def test_sft_trainer_of_trl_trains_with_it(tmp_path):
    import datasets
    import trl

    tokenizer = numbers_tokenizer()
    data = datasets.Dataset.from_list(
        [{"input_ids": Lines()[i]["input_ids"].tolist()} for i in range(24)]
    )
    ends = []
    for in_backward in (False, True, True):
        model = quantised()
        arguments = trl.SFTConfig(
            **settings(
                tmp_path / str(len(ends)),
                1,
                max_grad_norm=0.0,
                gradient_checkpointing=False,
                bf16=False,
            ),
            max_length=8,
        )
        chosen = trainer_optimizer(arguments, "muon", moments="8bit", in_backward=in_backward)
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=data,
            processing_class=tokenizer,
            optimizer_cls_and_kwargs=chosen,
        )
        resume = str(tmp_path / "1" / "checkpoint-3") if len(ends) == 2 else None
        trainer.train(resume_from_checkpoint=resume)
        ends.append((model_bits(model), losses(trainer)[-3:]))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][0] != model_bits(quantised())


def test_what_is_read_of_the_arguments():
    arguments = transformers.TrainingArguments(
        "out",
        learning_rate=3e-4,
        weight_decay=0.2,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        use_cpu=True,
        report_to=[],
    )
    _, chosen = trainer_optimizer(arguments, lr=1.0)
    wanted = {
        "lr": 1.0,
        "weight_decay": 0.2,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "rule": "adamw",
        "in_backward": None,
    }
    assert chosen == wanted
    arguments.max_grad_norm = 0.0
    asked = trainer_optimizer(arguments, "muon", in_backward=True)[1]["in_backward"]
    assert asked == {"clip": "previous", "max_norm": math.inf, "first": "measure"}
    factory, chosen = trainer_optimizer(arguments, "muon", other_lr=1e-4)
    optimizer = factory()(nn.Sequential(nn.Linear(4, 4)), **chosen)
    assert [(group["direction"], group["lr"]) for group in optimizer.param_groups] == [
        ("muon", 3e-4),
        ("adam", 1e-4),
    ]


def test_what_cannot_be_is_refused():
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[])
    with pytest.raises(
        ValueError,
        match="rule='moun' is unknown: one of adamw, muon, adafactor; did you mean 'muon'",
    ):
        trainer_optimizer(arguments, "moun")
    with pytest.raises(
        TypeError, match="arguments is a dict without learning_rate: TrainingArguments are needed"
    ):
        trainer_optimizer({})
    incomplete = SimpleNamespace(
        learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1.0, gradient_accumulation_steps=1
    )
    with pytest.raises(TypeError, match="arguments is a SimpleNamespace without adam_beta1"):
        trainer_optimizer(incomplete)
    scaled = SimpleNamespace(**{**vars(arguments), "fp16": True})
    with pytest.raises(ValueError, match="in_backward=True can't be used with fp16=True"):
        trainer_optimizer(scaled, in_backward=True)
    factory, chosen = trainer_optimizer(arguments, moment="8bit")
    with pytest.raises(TypeError, match="unexpected keyword argument 'moment'"):
        factory()(torch.nn.Linear(2, 2), **chosen)


def test_a_trainer_that_gives_no_model_is_told_the_version() -> None:
    """As that of transformers before 5.2."""
    arguments = transformers.TrainingArguments("out", use_cpu=True, report_to=[])
    factory, options = trainer_optimizer(arguments)
    with pytest.raises(TypeError, match=r"trainer_optimizer needs transformers 5\.2 or newer"):
        factory([torch.zeros(2, requires_grad=True)], **options)
