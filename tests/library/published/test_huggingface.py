"""Quantised models of transformers: saved, read back and trained on to the bit, by its
own means.
"""

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from hf_cases import gpt2, llama, logits, read_folder, transformers
from optimizer_cases import frozen
from surgery_models import model_bits
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.nn.utils import prune

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, quantize_model
from fp8manifold._doors import quantizer
from fp8manifold.nn._saved import spec_as_json

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(12).view(2, 6)
DELAYED = LayerSpec(
    "E4M3",
    activation={"format": "E4M3", "policy": "delayed", "history": 16},
    gradient="E5M2",
    rounding="split",
)
MAKERS = pytest.mark.parametrize("maker", [llama, gpt2])


def learnt(model: Any, steps: int = 2) -> Any:
    """The model after a few steps, so that its counts, histories and draws are not
    those of the start.
    """
    optimizer = fm.optim.StiffnessAdamW(model.train().parameters(), lr=1e-2)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@MAKERS
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
@pytest.mark.parametrize("tied", ["leave", "untie", "was not"])
def test_a_model_comes_back_to_the_bit(maker, storage, tied, tmp_path):
    tmp_path = tmp_path / tied
    ties = "refuse" if tied == "was not" else tied
    model = quantize_model(maker(tied != "was not"), {"*": "E4M3"}, storage, tied=ties)
    learnt(model).save_pretrained(tmp_path)
    loaded = fm.load(tmp_path)
    assert model_bits(loaded) == model_bits(model)
    assert torch.equal(logits(loaded), logits(model))
    head, embedding = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert (head is embedding) == (tied == "leave")
    loaded.save_pretrained(tmp_path / "again")
    assert model_bits(fm.load(tmp_path / "again")) == model_bits(model)
    assert model_bits(learnt(loaded)) == model_bits(learnt(model))  # and goes on as it would have


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ("", 1),
        ("_scale", 1),
        ("_counter", 1),
        ("_traits", 1),
        ("_scaler.value", 0),
        ("s", 0),
    ],
)
def test_each_part_of_a_weight_is_named_whole(part, count):
    """transformers before 5.22 takes a name for a weight's that only begins as its name
    does.
    """
    model = quantize_model(
        llama(), DELAYED, tied="leave", parameters={"*embed_tokens.weight": "E4M3"}
    )
    quantizer.attach(model)
    patterns = []
    for conversion in model.hf_quantizer.get_weight_conversions():
        patterns += conversion.source_patterns
    name = f"model.layers.0.mlp.up_proj.weight{part}"
    matching = [pattern for pattern in patterns if re.search(pattern, name)]
    assert len(matching) == count, matching


@pytest.mark.parametrize("name", ["E5M2", "E3M4", "E1M6", "E7M0", "E4M3FNUZ", "P3109_8P4", "E2M1"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_every_format_and_scale_comes_back(name, granularity, tmp_path):
    options: Any = {"granularity": granularity, "tied": "leave", "seed": 3, "rounding": "nearest"}
    model = quantize_model(llama(), {"*": name}, "codes", **options)
    folder = tmp_path / f"{name}-{granularity}"
    model.save_pretrained(folder, max_shard_size="20KB" if granularity == "channel" else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 2) == (granularity == "channel")
    assert model_bits(fm.load(folder)) == model_bits(model)


FIXED = {"format": "E4M3", "ste": "clipped", "scale": 0.25}
SPECS = [
    DELAYED,
    LayerSpec(),
    LayerSpec("P3109_8P4", granularity="block", rounding="stochastic"),
    LayerSpec(FIXED, activation={"format": "E5M2", "granularity": "channel"}),
    LayerSpec(gradient={"weight": {"format": "E5M2", "scale": "global"}}),
    LayerSpec("E3M4", policy="static", ste="relu", gradient={"activation": "E5M2_B14"}),
    LayerSpec(activation="E4M3", policy="delayed", history=32),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_specification_survives_json(spec):
    assert LayerSpec(**json.loads(json.dumps(spec_as_json(spec)))) == spec


def settings_of(layer: QuantizedLinear) -> dict[str, Any]:
    names = ("_headroom", "_keep_remainder", "_defers_weight_gradient", "_seed")
    return {name: getattr(layer, name) for name in names}


@MAKERS
def test_what_layers_are_made_as_comes_back(maker, tmp_path):
    formats = {"*": "none", "q_proj" if maker is llama else "c_attn": DELAYED}
    model = quantize_model(maker(), formats, "master", tied="leave", defer_weight_gradients=True)
    formats = {"*": "none", "mlp": "E5M2", "lm_head": "none"}
    quantize_model(model, formats, "codes", seed=5, headroom=4.0, keep_remainder=True)
    learnt(model, 3).save_pretrained(tmp_path)
    loaded = fm.load(tmp_path)
    assert model_bits(loaded) == model_bits(model)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert settings_of(loaded.get_submodule(name)) == settings_of(layer), name
    assert model_bits(learnt(loaded)) == model_bits(learnt(model))


@pytest.mark.parametrize("storage", ["codes", "grid"])
def test_the_retraction_comes_back(storage, tmp_path):
    euclidean = {"retraction": "euclidean"}
    model = quantize_model(llama(), {"*": "none", "mlp": "E5M2"}, storage, **euclidean)
    model.save_pretrained(tmp_path)
    layers = [layer for layer in fm.load(tmp_path).modules() if isinstance(layer, QuantizedLinear)]
    assert {layer.weight.manifold.retraction for layer in layers} == {"euclidean"}


@pytest.mark.parametrize("maker", [llama, gpt2])
@pytest.mark.parametrize("storage", ["codes", "grid", "master"])
@pytest.mark.parametrize(
    ("saved", "wanted"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_model_is_read_in_the_dtype_asked_for(maker, storage, saved, wanted, tmp_path):
    model = quantize_model(maker().to(saved), {"*": "E4M3"}, storage, tied="leave")
    model.save_pretrained(tmp_path)
    loaded = fm.load(tmp_path, dtype=wanted)
    assert {p.dtype for p in loaded.parameters()} == {wanted}
    for name, p in model.to(wanted).named_parameters():
        assert torch.equal(loaded.get_parameter(name), p), name
    torch.testing.assert_close(
        logits(loaded), logits(model), rtol=0.05, atol=0.05
    )  # .to() casts positions, too
    learnt(loaded, 1)


def test_scales_are_not_cast_with_the_model(tmp_path):
    """A number that bfloat16 does not have."""
    model: Any = quantize_model(llama(), {"*": "E4M3"}, "codes", tied="leave")
    scale = model.model.layers[0].mlp.up_proj.weight.scale.fill_(1 / 3)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        fm.load(tmp_path, dtype=torch.bfloat16).model.layers[0].mlp.up_proj.weight.scale, scale
    )


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = torch.randint(48, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trained(
    model: Any, folder: Path, optimizer: str, resume: Path | None = None, **options: Any
) -> Any:
    """A Trainer that has taken six steps of four sequences, with a checkpoint after
    three.
    """
    sizes = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
    }
    makers: dict[str, Any] = {
        "8bit": lambda p: fm.optim.StiffnessAdamW(p, lr=1e-2, moments="8bit"),
        "residual8": lambda p: fm.optim.StiffnessAdamW(p, lr=1e-2, writeback="residual8"),
        "muon": lambda p: fm.optim.StiffnessMuon.for_model(model, lr=1e-2),
        "wrapper": lambda p: fm.optim.StiffnessWrapper(torch.optim.SGD(p, lr=1e-2)),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    quiet: Any = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 0}
    steps = {"output_dir": str(folder), "max_steps": 6, "save_steps": 3, "logging_steps": 1}
    arguments = transformers.TrainingArguments(**steps, **quiet, **(sizes | options))
    stepping = makers[optimizer](model.parameters())
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Lines(), optimizers=(stepping, None)
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@MAKERS
@pytest.mark.parametrize("optimizer", ["8bit", "residual8", "muon", "wrapper", "adamw"])
def test_a_trainer_goes_on_where_it_was(maker, optimizer, tmp_path):
    """A checkpoint that a model made anew takes up is an uninterrupted run: losses,
    weights and states.
    """
    storage: Any = "master" if optimizer == "adamw" else "codes"
    whole, again = (
        quantize_model(maker(), {"*": DELAYED, "mlp": "E4M3"}, storage, tied="leave")
        for _ in range(2)
    )
    ended = trained(whole, tmp_path / "whole", optimizer)
    resumed = trained(again, tmp_path / "cut", optimizer, tmp_path / "whole" / "checkpoint-3")
    assert losses(resumed)[-3:] == losses(ended)[-3:]
    assert model_bits(again) == model_bits(whole)
    assert model_bits(fm.load(tmp_path / "whole" / "checkpoint-6")) == model_bits(whole)
    assert frozen(resumed.optimizer.state_dict()) == frozen(ended.optimizer.state_dict())


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_a_trainer_goes_on_from_what_was_read(options, tmp_path):
    """Under autocast, and with activations computed again where no scale is delayed, of
    a model out of a folder.
    """
    spec = DELAYED if "bf16" in options else LayerSpec("E4M3", activation="E4M3", gradient="E5M2")
    quantize_model(llama(), {"*": spec}, "codes", tied="leave").save_pretrained(tmp_path / "start")
    whole, again = fm.load(tmp_path / "start"), fm.load(tmp_path / "start")
    trained(whole, tmp_path / "whole", "8bit", **options)
    trained(again, tmp_path / "cut", "8bit", tmp_path / "whole" / "checkpoint-3", **options)
    assert model_bits(again) == model_bits(whole)
    assert model_bits(whole) != model_bits(fm.load(tmp_path / "start"))


def test_what_is_saved_is_what_the_model_is_now(tmp_path):
    model = quantize_model(llama(), {"*": "none", "mlp": "E4M3"}, "codes")
    quantize_model(model, {"*": "none", "q_proj": "E5M2"}, "codes")
    model.save_pretrained(tmp_path / "more")
    assert model_bits(fm.load(tmp_path / "more")) == model_bits(model)
    fm.dequantize_model(model).save_pretrained(tmp_path / "floats")
    assert "quantization_config" not in json.loads(
        (tmp_path / "floats" / "config.json").read_text()
    )
    assert torch.equal(logits(read_folder(tmp_path / "floats")), logits(model))


@MAKERS
def test_a_model_is_averaged(maker, tmp_path):
    model = quantize_model(maker(), {"*": "E4M3"}, "codes", tied="leave")
    average = fm.averaged_model(model)
    first = fm.dequantize_model(copy.deepcopy(model))
    average.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    average.update_parameters(model)
    second = fm.dequantize_model(copy.deepcopy(model))
    averages = dict(average.module.named_parameters())
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(averages[name], (one + two) / 2)
    average.module.save_pretrained(tmp_path)
    assert torch.equal(logits(read_folder(tmp_path)), logits(average.module))


READS_A_PICKLE = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    model = pickle.load(file)
model.save_pretrained(sys.argv[2])
"""


def test_a_model_is_read_from_a_pickle_by_another_process(tmp_path):
    model = quantize_model(llama(), "E4M3", tied="leave")
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    command = [sys.executable, "-W", "ignore", "-c", READS_A_PICKLE, path, tmp_path / "saved"]
    subprocess.run(command, check=True, timeout=300)
    assert model_bits(fm.load(tmp_path / "saved")) == model_bits(model)


def test_names_that_a_module_has_not_are_no_classes():
    with pytest.raises(AttributeError, match="no attribute 'Fp8ManifoldTrainer'"):
        quantizer.Fp8ManifoldTrainer  # noqa: B018


def test_a_weight_that_is_computed_later_is_not_saved(tmp_path):
    model = quantize_model(llama(), "E4M3", tied="leave")
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    with pytest.raises(ValueError, match=r"layer '.*up_proj' can't be saved: its weight is comp"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("part", ["model", "copy", "base"])
def test_a_part_of_a_model_is_saved(part, tmp_path):
    model = quantize_model(llama(), "E4M3", "codes", tied="leave")
    saved = {"model": model, "copy": copy.deepcopy(model), "base": model.model}[part]
    saved.save_pretrained(tmp_path)
    assert not quantizer.is_attached(saved)
    assert model_bits(fm.load(tmp_path)) == model_bits(saved)


def quantised_or_read(kind: str, folder: Path) -> Any:
    """Return a model that was quantised or read here, in float32."""
    if kind == "quantised":
        return quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    if not folder.exists():
        make(kind, folder)
    return fm.load(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["quantised", "rows", "squares, experts", "gpt-oss"])
def test_a_trainer_saves_and_resumes(kind, tmp_path):
    whole, again = (quantised_or_read(kind, tmp_path / "source") for _ in range(2))
    trained(whole, tmp_path / "whole", "8bit")
    trained(again, tmp_path / "cut", "8bit", tmp_path / "whole" / "checkpoint-3")
    assert model_bits(again) == model_bits(whole)
    loaded = fm.load(tmp_path / "whole" / "checkpoint-6", dtype=torch.float32)
    assert model_bits(loaded) == model_bits(whole)


def test_a_trainer_ends_with_its_best_model(tmp_path):
    """A rate at which the loss grows: the first checkpoint is the best."""
    model = quantize_model(llama(), {"*": "E4M3"}, tied="leave")
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    stepping = fm.optim.StiffnessAdamW(model.parameters(), lr=1.0)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Lines(),
        eval_dataset=Lines(),
        optimizers=(stepping, None),
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best != tmp_path / "checkpoint-4"
    assert model_bits(model) == model_bits(fm.load(best))


def test_a_trainer_that_is_imported_later_reads_side_files(tmp_path):
    lines = [
        "import sys, transformers, fp8manifold as fm",
        "config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, vocab_size=8,",
        "    num_hidden_layers=1, num_attention_heads=2)",
        "fm.quantize_model(transformers.LlamaForCausalLM(config), {'*': 'E4M3'}, tied='leave')",
        "assert 'transformers.trainer' not in sys.modules",
        "method = transformers.Trainer._load_from_checkpoint",
        "assert hasattr(method, '__wrapped__')",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=tmp_path)


@pytest.mark.parametrize("storage", ["codes", "master"])
def test_floats_are_saved_as_floats(storage, tmp_path):
    model = quantize_model(llama(), "E4M3", storage, tied="leave")
    if storage == "codes":
        fm.dequantize_model(model)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_folder_of_an_earlier_version_is_refused_without_this_package(tmp_path, monkeypatch):
    """Whose codes have another shape than a float weight."""
    model = quantize_model(llama(), "E4M3", tied="leave")
    quantizer.attach(model).save_pretrained(tmp_path)
    auto = sys.modules["transformers.quantizers.auto"]
    for mapping in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(mapping, "fp8manifold")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", ["leave", "untie"])
@pytest.mark.parametrize("by_position", [True, False], ids=["by position", "by name"])
def test_a_given_state_is_saved(tied, by_position, tmp_path):
    model = quantize_model(llama(), {"*": "E4M3"}, tied=tied, embeddings={"*": "E5M2"})
    expected = model_bits(model)
    best = copy.deepcopy(model.state_dict())
    learnt(model)
    if by_position:
        model.save_pretrained(tmp_path / "best", True, best)
    else:
        model.save_pretrained(tmp_path / "best", state_dict=best)
    assert model_bits(fm.load(tmp_path / "best")) == expected
    model.save_pretrained(tmp_path / "last")
    assert model_bits(fm.load(tmp_path / "last")) == model_bits(model) != expected


def of_another_format(state: Any) -> None:
    state.update(quantize_model(llama(), "E5M2", tied="leave").state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "state_dict has no 'model.norm.weight'"),
        (lambda state: state.update(llama().state_dict()), "in another format or shape"),
        (of_another_format, "in another format or shape"),
    ],
    ids=["a part", "floats", "another format"],
)
def test_a_given_state_of_another_model_is_refused(change, message, tmp_path):
    model = quantize_model(llama(), "E4M3", tied="leave")
    state = model.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        model.save_pretrained(tmp_path, state_dict=state)


def with_checkpoints(model: Any) -> None:
    checkpoint_wrapper.apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, nn.Linear | nn.Embedding)
    )


def with_compiled_blocks(model: Any) -> None:
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(block, backend="eager")


WRAPPED = pytest.mark.parametrize("wrap", [with_checkpoints, with_compiled_blocks])


@WRAPPED
def test_a_model_with_wrapped_modules_comes_back(wrap, tmp_path):
    model, again = (
        quantize_model(llama(), {"*": "E4M3"}, tied="leave", embeddings={"*": "E5M2"})
        for _ in range(2)
    )
    wrap(model)
    model.save_pretrained(tmp_path)
    assert model_bits(fm.load(tmp_path)) == model_bits(again)


@WRAPPED
def test_a_trainer_goes_on_with_wrapped_modules(wrap, tmp_path):
    whole, again = (quantize_model(llama(), {"*": "E4M3"}, tied="leave") for _ in range(2))
    for model in (whole, again):
        wrap(model)
    trained(whole, tmp_path / "whole", "8bit")
    trained(again, tmp_path / "cut", "8bit", tmp_path / "whole" / "checkpoint-3")
    assert model_bits(again) == model_bits(whole)
    read_again = fm.load(tmp_path / "whole" / "checkpoint-6")
    assert torch.equal(logits(read_again), logits(whole))


def test_embeddings_that_the_class_leaves_out_are_saved_in_codes(tmp_path):
    sizes = {"d_model": 32, "vocab_size": 48, "max_position_embeddings": 16, "pad_token_id": 0}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 32}
    config = transformers.MarianConfig(**sizes, decoder_start_token_id=0, eos_token_id=1)
    model = quantize_model(transformers.MarianMTModel(config), "E4M3", embeddings="E4M3")
    model.save_pretrained(tmp_path)
    again = fm.load(tmp_path)
    assert model_bits(again) == model_bits(model)


def test_a_head_in_codes_that_is_tied_later_is_refused(tmp_path):
    model = quantize_model(llama(tied=False), "E4M3", embeddings="E4M3")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"'lm_head\.weight', .* is also 'model\.embed_tokens"):
        model.save_pretrained(tmp_path)


def test_a_layer_on_the_continuous_manifold_is_not_saved(tmp_path):
    model = quantize_model(llama(), {"*": "none", "q_proj": "E4M3"}, "grid")
    layer = model.model.layers[0].self_attn.q_proj
    layer.manifold = fm.StiffnessManifold("E4M3", layer.weight_scale())
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.self_attn\.q_proj' is on a StiffnessManifold"
    ):
        fm.save(model, tmp_path)


TAMPERED: list[tuple[dict[str, Any], str]] = [
    ({"seeds": {"model.nowhere": 0}}, "the model has no float layer 'model.nowhere'"),
    ({"seeds": {"model.embed_tokens": 0}}, "the model has no float layer 'model.embed_tokens'"),
    (
        {"seeds": {"model.layers.0.mlp.up_proj": -1}},
        "seed of 'model.layers.0.mlp.up_proj'=-1 is out of range",
    ),
    ({"storage": "fp4"}, "storage='fp4' is unknown"),
    ({"more": 1}, "unknown key 'more'"),
    ({"spec": {"weight": {"format": "E9M9"}}}, "E9M9"),
    (
        {"spec": {"weight": {"format": "E5M2"}}},
        "automatic conversion",
    ),  # as transformers says of any such error
]


@pytest.mark.parametrize(("changes", "message"), TAMPERED)
def test_a_folder_that_was_tampered_with_is_refused(changes, message, tmp_path):
    quantizer.attach(
        quantize_model(llama(), {"*": "none", "mlp": "E4M3"}, "codes")
    ).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    settings["quantization_config"]["layers"][0] |= changes
    path.write_text(json.dumps(settings))
    with pytest.raises((ValueError, RuntimeError), match=message):
        fm.load(tmp_path)


def test_a_missing_or_old_package_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
        with pytest.raises(ImportError, match=r"needs transformers 5 or newer, not 4\.57\.1"):
            quantizer._classes.__wrapped__()
    monkeypatch.setitem(sys.modules, "transformers.quantizers.auto", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'fp8manifold\[hf\]'"):
        quantizer.register()
