"""A loss in chunks is the loss of all logits, and never has all of them."""

import copy
import gc
import inspect
import sys
import types
import weakref

import pytest
import torch
import transformers
from hf_cases import SIZES, gpt2, llama, seeded
from torch.utils._python_dispatch import TorchDispatchMode

import fp8manifold as fm
from fp8manifold import _chunked_loss
from fp8manifold.huggingface import chunked_loss

VOCABULARY = SIZES["vocab_size"]
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def quantized(tied, dtype=torch.float32):
    return fm.quantize_model(llama(tied=tied).to(dtype), "E4M3", embeddings="E4M3")


MODELS = {
    "tied": llama,
    "own head": lambda: llama(tied=False),
    "bfloat16": lambda: llama(tied=False).bfloat16(),
    "codes, tied": lambda: quantized(tied=True),
    "codes, own head": lambda: quantized(tied=False),
    "codes, bfloat16": lambda: quantized(tied=True, dtype=torch.bfloat16),
    "positions learned": gpt2,
    "logits capped": lambda: seeded(
        "Gemma2", transformers.Gemma2Config(**SIZES, head_dim=32, final_logit_softcapping=3.0)
    ),
    "logits divided": lambda: seeded(
        "Granite", transformers.GraniteConfig(**SIZES, logits_scaling=3.0)
    ),
    "logits multiplied": lambda: seeded(
        "Cohere", transformers.CohereConfig(**SIZES, eos_token_id=0)
    ),
    "loss of routers": lambda: seeded(
        "Qwen3Moe", transformers.Qwen3MoeConfig(**SIZES, **MIXTURE, output_router_logits=True)
    ),
}


def batch(length=15):
    text = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = text.clone()
    labels[0, :4] = -100
    return {"input_ids": text, "labels": labels}


def loss_and_gradients(model, **inputs):
    model.train().zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def check_same(model, other, **inputs):
    loss, gradients = loss_and_gradients(model, **inputs)
    other_loss, other_gradients = loss_and_gradients(other, **inputs)
    torch.testing.assert_close(other_loss, loss, rtol=2e-6, atol=0)
    half = any(p.dtype is torch.bfloat16 for p in model.parameters())
    for gradient, other_gradient in zip(gradients, other_gradients, strict=True):
        error = (other_gradient.float() - gradient.float()).norm()
        assert error <= (1e-2 if half else 3e-6) * gradient.float().norm()


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_loss_and_gradients_are_those_of_all_logits(make):
    model = make()
    chunked = copy.deepcopy(model)
    chunked_loss(chunked, tokens=7)
    check_same(model, chunked, **batch())


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": torch.tensor(17)},
        {"num_items_in_batch": 17},
        {"shift_labels": batch()["labels"]},
    ],
    ids=["items, a tensor", "items, a number", "shifted labels"],
)
def test_options_of_the_loss_count_as_before(options):
    model = llama()
    chunked = copy.deepcopy(model)
    chunked_loss(chunked, tokens=8)
    check_same(model, chunked, **batch(), **options)


@pytest.mark.parametrize("tokens", [1, 30, 1000])
def test_any_number_of_tokens_gives_the_same(tokens):
    model = quantized(tied=False)
    chunked = copy.deepcopy(model)
    chunked_loss(chunked, tokens)
    check_same(model, chunked, **batch())


def test_a_copy_computes_in_chunks_with_its_own_weights():
    model = llama()
    chunked_loss(model, tokens=5)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    assert twin(**batch()).loss != model(**batch()).loss
    assert _chunked_loss._HANDLE in vars(twin)


class LargestOf(TorchDispatchMode):
    """The most numbers of a tensor whose last dimension is the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        for tensor in tensors:
            is_tensor = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
            if is_tensor and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor[..., 0].numel())
        return result


@pytest.mark.parametrize("make", [llama, lambda: quantized(tied=False)], ids=["floats", "codes"])
def test_only_the_logits_of_a_chunk_exist(make):
    """More tokens than the width: the weight's gradient is (width, vocabulary) for a moment."""
    length, width = 100, SIZES["hidden_size"]
    rows = {}
    for tokens in (None, 4):
        model = make()
        if tokens:
            chunked_loss(model, tokens)
        with LargestOf(VOCABULARY) as largest:
            model.train()(**batch(length)).loss.backward()
        rows[tokens] = largest.rows
    assert rows[None] == 2 * length
    assert rows[4] <= width


def test_only_the_logits_of_a_chunk_exist_without_gradients():
    model = llama().eval()
    chunked_loss(model, tokens=4)
    with LargestOf(VOCABULARY) as largest, torch.no_grad():
        model(**batch(length=100))
    # the weight's own transpose is a view of (width, vocabulary)
    assert largest.rows <= SIZES["hidden_size"]


def test_each_parameter_steps_once_in_the_backward_pass():
    """Though the output layer is called for each chunk."""
    finals = []
    for tokens in (None, 5):
        model = quantized(tied=True).train()
        optimizer = fm.optim.StiffnessAdamW(model.parameters(), 1e-2, moments="8bit")
        if tokens:
            chunked_loss(model, tokens)
        with fm.optim.step_in_backward(optimizer):
            for _ in range(3):
                model(**batch()).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}
        finals.append(model(**batch()).loss.item())
    assert finals[0] == pytest.approx(finals[1], abs=2e-2)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        text = batch()["input_ids"][index % 2]
        return {"input_ids": text, "labels": text}


def train_by_trainer(folder, tokens, **options):
    model = quantized(tied=True)
    if tokens:
        chunked_loss(model, tokens)
    arguments = transformers.TrainingArguments(
        folder,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=1,
        disable_tqdm=True,
        **options,
    )
    factory, chosen = fm.huggingface.trainer_optimizer(arguments, moments="8bit", in_backward=True)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        optimizer_cls_and_kwargs=(factory, chosen),
    )
    trainer.train()
    log = trainer.state.log_history
    return [line.get("loss", line.get("eval_loss")) for line in log[:-1]]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["plain", "accumulated", "autocast"],
)
def test_trainer_trains_and_evaluates_as_before(tmp_path, options):
    whole = train_by_trainer(tmp_path, None, **options)
    assert train_by_trainer(tmp_path, 7, **options) == pytest.approx(whole, rel=1e-4)


def test_a_trainer_that_computes_its_loss_from_logits_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"pass labels by name \(labels=\.\.\.\)"):
        train_by_trainer(tmp_path, 7, label_smoothing_factor=0.1)


def test_it_is_compiled_without_a_break():
    model = llama().train()
    whole = model(**batch()).loss
    chunked_loss(model, tokens=8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch()).loss, whole)


@pytest.mark.extra("peft")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("layers", [["q_proj"], ["q_proj", "lm_head"]], ids=["others", "head"])
def test_adapters_train_with_it(layers):
    import peft

    adapted = peft.get_peft_model(llama(tied=False), peft.LoraConfig(target_modules=layers))
    whole = adapted(**batch()).loss
    chunked_loss(adapted, tokens=6)
    loss = adapted(**batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, whole)


def test_without_labels_logits_are_whole_and_a_handle_removes_it():
    model = llama().eval()
    whole = model(**batch())
    before = inspect.signature(model.forward)
    handle = chunked_loss(model, tokens=4)
    assert inspect.signature(model.forward) == before
    with torch.no_grad():
        assert torch.equal(model(batch()["input_ids"]).logits, whole.logits)
    handle.remove()
    handle.remove()
    assert "forward" not in vars(model)
    assert torch.equal(model(**batch()).logits, whole.logits)
    with chunked_loss(model):
        assert _chunked_loss._HANDLE in vars(model)
    assert _chunked_loss._HANDLE not in vars(model)


def test_a_forward_that_was_put_over_it_stays_when_it_is_removed():
    model = llama().eval()
    whole = model(**batch())
    handle = chunked_loss(model, tokens=4)
    in_chunks = model.forward
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return in_chunks(*args, **options)

    model.forward = counted
    handle.remove()
    assert vars(model)["forward"] is counted
    assert torch.equal(model(**batch()).logits, whole.logits)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="put back the forward"):
        chunked_loss(model)
    del model.forward
    again = chunked_loss(model, tokens=4)
    torch.testing.assert_close(model(**batch()).loss, whole.loss)
    again.remove()
    assert "forward" not in vars(model)


def test_a_copy_is_removed_by_its_own_handle():
    model = llama()
    chunked_loss(model, tokens=4)
    copied = copy.deepcopy(model)
    vars(copied)[_chunked_loss._HANDLE].remove()
    assert "forward" not in vars(copied)
    assert "forward" in vars(model)


def test_it_keeps_no_model_alive():
    model = llama()
    chunked_loss(model)
    model(**batch())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits.argmax(-1),
        lambda logits: logits[:, -1],
        lambda logits: torch.logsumexp(logits, -1),
        lambda logits: logits * torch.ones(3),
        lambda logits: logits.view(2, -1, 3),
        lambda logits: logits.view(-1, VOCABULARY // 2),
        lambda logits: torch.nn.functional.cross_entropy(
            logits.view(-1, VOCABULARY), torch.zeros(30, dtype=torch.long), reduction="none"
        ),
    ],
    ids=[
        "method",
        "index",
        "function",
        "product",
        "view",
        "other rows",
        "loss that is not reduced",
    ],
)
def test_any_other_use_of_the_logits_is_refused(use):
    model = llama()
    chunked_loss(model, tokens=4)
    logits = model(**batch()).logits
    with pytest.raises((RuntimeError, AttributeError), match="only in chunks"):
        use(logits)


def make_twice(model):
    chunked_loss(model)
    chunked_loss(model)


def scaled(model):
    spec = fm.LayerSpec("E4M3", activation="E4M3")
    return fm.quantize_model(model, {"lm_head": spec}, tied="untie")


REFUSED = {
    "no model": (lambda: chunked_loss(torch.nn.Linear(2, 2)), TypeError, "not a transformers"),
    "no head": (lambda: chunked_loss(llama().model), TypeError, "no output layer"),
    "no tokens": (lambda: chunked_loss(llama(), 0), ValueError, "tokens=0"),
    "twice": (lambda: make_twice(llama()), RuntimeError, "already"),
    "scales": (lambda: chunked_loss(scaled(llama())), ValueError, "quantises its activation"),
}


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_what_it_cannot_mean_is_refused(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_training_without_labels_is_refused():
    model = llama().train()
    chunked_loss(model)
    with pytest.raises(RuntimeError, match="by name"):
        model(batch()["input_ids"])


def test_a_model_that_passes_its_head_by_is_refused():
    class Bypass(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None):
            hidden = self.model(input_ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
            return self.loss_function(logits, labels, self.config.vocab_size)

    model = Bypass(llama().config)
    chunked_loss(model)
    with pytest.raises(RuntimeError, match="did not call its output layer"):
        model(**batch())
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("make", [llama, lambda: quantized(tied=False)], ids=["floats", "codes"])
def test_ligers_kernel_gets_weight_rows_and_labels_on_a_card(monkeypatch, make):
    """A stand-in for Liger, which runs on GPUs only, computes the sum as Liger says."""
    calls = []

    def stand_in(ignore_index, reduction):
        def loss(weight, rows, target, bias):
            calls.append(tuple(rows.shape))
            logits = torch.nn.functional.linear(rows, weight, bias).float()
            return torch.nn.functional.cross_entropy(
                logits, target, ignore_index=ignore_index, reduction=reduction
            )

        return loss

    model = make()
    chunked = copy.deepcopy(model)
    chunked_loss(chunked, tokens=7)
    monkeypatch.setattr(_chunked_loss, "_liger", lambda: stand_in)
    monkeypatch.setattr(_chunked_loss, "is_on_card", lambda x: True)
    check_same(model, chunked, **batch())
    assert calls == [(30, SIZES["hidden_size"])]


@pytest.mark.parametrize("installed", [False, True])
def test_liger_is_taken_where_it_is_installed(monkeypatch, installed):
    kernel = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss="kernel")
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernel if installed else None)
    _chunked_loss._liger.cache_clear()
    assert _chunked_loss._liger() == ("kernel" if installed else None)
    _chunked_loss._liger.cache_clear()


HOOKS = {
    "of logits": lambda head: head.register_forward_hook(lambda _, inputs, logits: logits * 0.5),
    "of the input": lambda head: head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    "that adds": lambda head: head.register_forward_hook(lambda _, inputs, logits: logits + 1),
    "that looks": lambda head: head.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", ["own head", "codes, tied"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_the_output_layer_run_once_for_each_chunk(kind, hook):
    whole, chunked = MODELS[kind](), MODELS[kind]()
    for model in (whole, chunked):
        HOOKS[hook](model.lm_head)
    chunked_loss(chunked, 4)
    loss, gradients = loss_and_gradients(whole, **batch())
    chunked_result, chunked_gradients = loss_and_gradients(chunked, **batch())
    torch.testing.assert_close(chunked_result, loss)
    torch.testing.assert_close(chunked_gradients, gradients)
    assert len(chunked.lm_head._forward_hooks) + len(chunked.lm_head._forward_pre_hooks) == 1
