"""Published FP8 models: read as they are, trained in place, saved and read again, and
written back to the byte.
"""

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make, rewritten, tensors_of, transformers
from surgery_models import model_bits
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import QuantizedLinear, load, save

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries announce is their own business
TOKENS = torch.arange(24).view(2, 12)


def adamw(model: Any) -> Any:
    return fm.optim.StiffnessAdamW(model.parameters(), lr=1e-3)


def files(folder: Path) -> dict[str, bytes]:
    """Return what a folder has, without the counts beside it."""
    paths = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".grids"]
    return {path.name: path.read_bytes() for path in paths}


def saved_files(model: Any, folder: Path, **options: Any) -> dict[str, bytes]:
    save(model, folder, **options)
    return files(folder)


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(model.train()(TOKENS, labels=TOKENS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return [loss.item() for loss in losses]


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["squares, shards", "squares, experts", "rows", "mxfp4"])
def test_a_published_model_is_averaged_in_floats(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    make(name, folder)
    model = load(folder)
    average = fm.averaged_model(model)
    # transformers refuses Module.float of a quantised model
    floats = fm.dequantize_model(nn.Module.float(copy.deepcopy(model)))
    for _ in range(2):
        average.update_parameters(model)
    assert not average.module.is_quantized
    for index, (parameter, values) in enumerate(
        zip(average.module.parameters(), floats.parameters(), strict=True)
    ):
        assert type(parameter) is nn.Parameter, index
        assert parameter.dtype is torch.float32, index
        assert torch.equal(parameter, values), index
    average.module.save_pretrained(tmp_path / "average")


@pytest.mark.parametrize(
    "name", ["squares, shards", "squares, experts", "rows, experts", "modelopt, kv", "mxfp4"]
)
def test_a_saved_model_still_knows_how_it_was_published(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "published")
    (folder / "tokenizer.model").write_bytes(b"\0words")
    model = load(folder)
    assert saved_files(model, tmp_path / "same") == files(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a second copy of the weights")
    assert "pytorch_model.bin" not in saved_files(load(folder), tmp_path / "without it")
    (folder / "pytorch_model.bin").unlink()
    train(model, adamw(model), 1)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    expected = saved_files(model, tmp_path / "trained")
    assert expected.keys() == files(folder).keys()
    assert expected != files(folder)
    assert saved_files(again, tmp_path / "again", source=folder) == expected
    assert train(model, adamw(model), 2) == train(again, adamw(again), 2)


def test_saved_settings_name_no_path_and_say_that_the_source_is_to_be_given(tmp_path: Path) -> None:
    folder = make("rows", tmp_path / "published")
    (folder / "tokenizer.model").write_bytes(b"words")
    model = load(folder)
    model.save_pretrained(tmp_path / "saved")
    assert all(str(tmp_path).encode() not in data for data in files(tmp_path / "saved").values())
    assert str(tmp_path) not in repr(model.config)
    again = load(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.model").unlink()
    with pytest.warns(
        UserWarning, match=r"not copied: tokenizer\.model; not in '.*' any longer: give source="
    ):
        save(again, tmp_path / "again")
    assert files(tmp_path / "again").keys() == files(folder).keys() - {"tokenizer.model"}
    save(again, tmp_path / "again", source=folder)
    assert files(tmp_path / "again").keys() == files(folder).keys()
    (folder / "tokenizer.model").unlink()
    with pytest.warns(
        UserWarning, match=r"not copied: tokenizer\.model; not in '.*' any longer: give source="
    ):
        save(model, tmp_path / "again")
    with refused(FileNotFoundError, "'nowhere' is neither a folder"):
        save(model, tmp_path / "again", source="nowhere")


def test_a_conversion_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("rows", tmp_path / "published")
    loading = importlib.import_module("transformers.core_model_loading")
    turned = loading.WeightConverter(
        ["down_proj.weight"], "down_proj.weight", [loading.Transpose(0, 1)]
    )
    mapping = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.setattr(mapping, "get_model_conversion_mapping", lambda *_, **__: [turned])
    with refused(ValueError, "down_proj.weight", "by Transpose, which is not supported"):
        load(folder)


def test_a_model_whose_layers_are_initialised_by_the_module_around_them_is_read(
    tmp_path: Path,
) -> None:
    """T5 draws the weights of its projections itself, and finds them without values
    while codes are read.
    """
    sizes = {
        "vocab_size": 48,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
    }
    config = transformers().T5Config(**sizes, decoder_start_token_id=0)
    model = transformers().T5ForConditionalGeneration(config).to(torch.bfloat16)
    fm.save(
        fm.quantize_model(model, "E4M3", tied="leave"), tmp_path / "published", "compressed-tensors"
    )
    expected = transformers().AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "published")
    loaded = load(tmp_path / "published")
    assert sum(isinstance(module, QuantizedLinear) for module in loaded.modules()) > 10
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    assert torch.equal(loaded(**inputs).logits, expected(**inputs).logits)
    assert saved_files(loaded, tmp_path / "same") == files(tmp_path / "published")


@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_rows_with_one_scale_in_the_file_share_it_when_they_are_written(
    writeback: str, tmp_path: Path
) -> None:
    """Experts whose gate and up have one scale each, and not the same: a step doubles
    those of single rows.
    """
    folder = make("tensor, experts", tmp_path / "published")
    model = load(folder, dtype=torch.float32)
    weight = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert (
        weight.granularity,
        weight.scale[:, :128].unique().numel(),
        len(weight.scale.unique()),
    ) == ("row", 4, 8)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2, writeback=writeback)
    train(model, optimizer, 5)
    old_scale, old_values = weight.scale.clone(), weight.dequantize()
    halves = old_scale.view(8, 128)
    assert not torch.equal(halves, halves[:, :1].expand(8, 128))
    files_after = saved_files(model, tmp_path / "trained")
    assert torch.equal(weight.scale.view(8, 128), halves.amax(1, keepdim=True).expand(8, 128))
    has_old_scale = (weight.scale == old_scale).expand_as(old_values)
    assert torch.equal(weight.dequantize()[has_old_scale], old_values[has_old_scale])
    assert (weight.dequantize() - old_values).abs().max() <= weight.scale.max() * 2**-9
    assert saved_files(model, tmp_path / "again") == files_after
    assert torch.equal(
        load(tmp_path / "trained", dtype=torch.float32)(TOKENS).logits, model(TOKENS).logits
    )
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.float32)
    assert saved_files(again, tmp_path / "again", source=folder) == files_after
    # what resumes goes on like the run that has saved
    resumed = fm.optim.StiffnessAdamW(again.parameters(), lr=1e-2, writeback=writeback)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2)
    train(again, resumed, 2)
    assert model_bits(again) == model_bits(model)


def test_transposed_experts_are_trained_as_the_file_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("gpt-oss", tmp_path / "published")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model = load(folder, dtype=torch.float32, experts_implementation="eager").train()
    plain = fm.dequantize_model(copy.deepcopy(model))
    reference = transformers().GptOssForCausalLM(plain.config).model.layers[0].mlp.experts
    assert type(plain.model.layers[0].mlp.experts) is type(reference)
    codes, floats = model.get_parameter(name), plain.get_parameter(name)
    assert (codes.granularity, codes.format.name, codes.shape) == ("block", "E2M1", floats.mT.shape)
    decoded, original = [], fm.FP8Tensor.decoded_rows
    monkeypatch.setattr(
        fm.FP8Tensor,
        "decoded_rows",
        lambda weight, take: decoded.append(take(weight.codes).numel()) or original(weight, take),
    )
    losses = [net(TOKENS, labels=TOKENS).loss for net in (model, plain)]
    assert losses[0].item() == losses[1].item()
    # One expert was decoded at a time.
    assert set(decoded) == {
        codes[0].numel(),
        model.get_parameter(name.replace("gate_up", "down"))[0].numel(),
    }
    for loss in losses:
        loss.backward()
    assert torch.equal(codes.grad.mT, floats.grad)
    exported, _ = fm.files.layout_state_dict(fm.quantize_model(copy.deepcopy(model), "E4M3"))
    assert torch.equal(exported[name], floats)
    train(model, adamw(model), 1)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert (
        saved_files(again, tmp_path / "again", source=folder)
        == saved_files(model, tmp_path / "trained")
        != files(folder)
    )
    fm.dequantize_model(again).save_pretrained(tmp_path / "floats")
    floats = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "floats", dtype=torch.float32
    )
    assert torch.equal(floats(TOKENS).logits, model(TOKENS).logits)


def test_a_trainer_trains_it_and_resumes(tmp_path: Path) -> None:
    library = transformers()
    folder = make("rows", tmp_path / "published")
    lines = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS] * 4

    def trained(model: Any, name: str, resume: bool = False) -> Any:
        arguments = library.TrainingArguments(
            str(tmp_path / name),
            max_steps=4,
            save_steps=2,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            seed=0,
        )
        chosen = fm.huggingface.trainer_optimizer(arguments, "muon")
        trainer = library.Trainer(
            model, arguments, train_dataset=lines, optimizer_cls_and_kwargs=chosen
        )
        trainer.train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2") if resume else None
        )
        return trainer.model

    model = trained(load(folder), "run")
    halfway = load(tmp_path / "run" / "checkpoint-2")
    again = trained(halfway, "resumed", resume=True)
    resumed = saved_files(again, tmp_path / "again")
    # Of the folder that it was read from, which is the trainer's.
    del resumed["trainer_state.json"]
    assert resumed == saved_files(model, tmp_path / "trained") != files(folder)


@pytest.mark.parametrize("name", ["tensor", "modelopt", "tensor of fp8, static"])
def test_inputs_are_rounded_as_stored(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "published")
    model = load(folder, activations="as stored")
    layer = model.model.layers[0].mlp.up_proj
    ends = ("input_scale", "activation_scale")
    scale = next(
        x for key, x in tensors_of(folder).items() if "0.mlp.up_proj" in key and key.endswith(ends)
    ).float()
    x = (torch.randn(3, 256, generator=torch.Generator().manual_seed(0)) * scale * 300).bfloat16()
    rounded = (
        (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    ).bfloat16()
    assert not torch.equal(rounded, x)
    train(model, adamw(model), 1)
    assert torch.equal(layer(x), nn.functional.linear(rounded, layer.weight.dequantize()))
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", activations="as stored")
    assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
    save(again, tmp_path / "trained")
    saved = tensors_of(tmp_path / "trained")
    assert all(
        torch.equal(saved[key], value)
        for key, value in tensors_of(folder).items()
        if key.endswith(ends)
    )


def test_compiled_it_warns_of_inputs_beyond_the_stored_scale(tmp_path: Path) -> None:
    make("modelopt", tmp_path / "published")
    model = load(tmp_path / "published", activations="as stored", dtype=torch.float32).eval()
    compiled, expected = torch.compile(model, backend="eager"), model(TOKENS[:, :4]).logits
    with pytest.warns(fm.SaturationWarning, match="a frozen E4M3 scale saturates"):
        assert torch.equal(compiled(TOKENS[:, :4]).logits, expected)


@pytest.mark.parametrize("name", ["squares", "rows, bfloat16", "modelopt"])
def test_load_into_reads_them_into_any_module(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / "published")
    config = transformers().AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expected = load(folder, seed=3)
    empty.model.rotary_emb = expected.model.rotary_emb
    model = fm.files.load_into(empty, folder, "as stored", seed=3).eval()
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    states = model.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(
        torch.equal(states[0][key], states[1][key])
        for key in states[0]
        if not key.endswith("_traits")
    )
    with refused(ValueError, "parameter", "has values already"):
        fm.files.load_into(model, folder, "as stored")
    with refused(TypeError, "needs files"):
        fm.files.load_into(empty, {}, "as stored")
    with pytest.raises(TypeError, match="granularity"):
        fm.files.load_into(empty, folder, "as stored", granularity="tensor")


def test_floats_are_never_rounded(tmp_path: Path) -> None:
    folder, third = make("squares", tmp_path / "published"), torch.full((256,), 1 / 3)
    norm = "model.layers.0.input_layernorm.weight"
    rewritten(folder, lambda name, value: {name: third if name == norm else value}, None)
    with refused(
        ValueError, norm, "'model.safetensors'", "F32", "torch.bfloat16", "dtype=torch.float32"
    ):
        load(folder)
    model = load(folder, dtype=torch.float32)
    assert saved_files(model, tmp_path / "same") == files(folder)
    model.model.norm.weight.data.fill_(1 / 3)
    model.model.embed_tokens.weight.data.fill_(0.5)
    save(model, tmp_path / "changed")
    saved, published = tensors_of(tmp_path / "changed"), tensors_of(folder)
    assert torch.equal(saved.pop("model.norm.weight"), third)
    assert all(saved[name].dtype == published[name].dtype for name in saved)


def test_what_the_model_has_no_place_for_is_copied(tmp_path: Path) -> None:
    """Layers for drafts, which transformers leaves out, beside experts."""
    folder = make("squares, deepseek", tmp_path / "published")
    drafts = {
        "model.layers.61.mlp.down_proj.weight": torch.ones(128, 256).to(torch.float8_e4m3fn),
        "model.layers.61.mlp.down_proj.weight_scale_inv": torch.full((1, 2), 0.3),
        "model.layers.61.enorm.weight": torch.ones(128, dtype=torch.bfloat16),
    }
    first = next(iter(tensors_of(folder)))
    rewritten(folder, lambda name, value: {name: value, **(drafts if name == first else {})}, None)
    model = load(folder)
    assert saved_files(model, tmp_path / "same") == files(folder)
    moved = folder.rename(tmp_path / "moved")
    with refused(FileNotFoundError, str(folder), "layers.61", "give source="):
        save(model, tmp_path / "lost")
    assert not (tmp_path / "lost").exists()
    assert saved_files(model, tmp_path / "found", source=moved) == files(moved)
    rewritten(moved, lambda name, value: {} if name in drafts else {name: value}, None)
    moved.rename(folder)
    with refused(ValueError, "layers.61", "has changed since"):
        save(model, tmp_path / "lost")


def test_it_can_be_written_over_what_was_read(tmp_path: Path) -> None:
    folder = make("squares, tied", tmp_path / "published")
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    published = files(folder)
    assert saved_files(model, folder) == published
    train(model, adamw(model), 1)
    save(model, folder)
    assert torch.equal(load(folder)(TOKENS).logits, model(TOKENS).logits)


Change = Callable[[str, Tensor], dict[str, Tensor]]


def without(*ends: str) -> Change:
    return lambda name, value: {} if name.endswith(ends) else {name: value}


UP = "up_proj.weight"
#: the weight of one expert, which is in floats beside three in codes
IN_FLOATS = f"1.{UP}"
#: the layout, what is changed in it, and words of the refusal, apart by &
REFUSED: list[tuple[str, Change, str]] = [
    ("squares", without(UP, f"{UP}_scale_inv"), "the model has & up_proj"),
    ("squares", without("model.norm.weight"), "the model has 'model.norm.weight' & lacks"),
    (
        "squares",
        lambda name, value: {name: value, name.replace("layers.0", "layers.7"): value.clone()},
        "model has no place for & layers.7 & 'model.safetensors'",
    ),
    (
        "rows",
        lambda name, value: {name: value[:64] if "up_proj" in name else value},
        f"{UP}' & (64, 256) & (384, 256)",
    ),
    (
        "squares, experts",
        lambda k, v: without(f"{IN_FLOATS}_scale_inv")(
            k, v.bfloat16() if k.endswith(IN_FLOATS) else v
        ),
        f"experts.1.{UP} & is not & gate_up_proj",
    ),
    (
        "squares, experts",
        without(f"experts.3.{UP}", f"experts.3.{UP}_scale_inv"),
        "gate_up_proj & do not cover it",
    ),
    (
        "mxfp4",
        lambda name, value: {name.replace("weight_packed", "weight_blocks"): value},
        "weight_blocks' of 'model.safetensors' & transposed experts & gpt-oss only",
    ),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(
    name: str, change: Change, words: str, tmp_path: Path
) -> None:
    folder = make(name, tmp_path / "published")
    rewritten(folder, change, None)
    with refused(ValueError, *words.split(" & ")):
        load(folder)


def test_scales_that_do_not_align_in_a_fused_weight_are_refused(tmp_path: Path) -> None:
    """Experts of 96 rows: a square of 128 would begin in one of two matrices and end in
    the other.
    """
    folder = make("squares, experts", tmp_path / "published")

    def narrow(name: str, value: Tensor) -> dict[str, Tensor]:
        is_expert = "experts" in name and not name.endswith("_scale_inv")
        if not is_expert:
            return {name: value}
        return {name: value[:, :96] if "down" in name else value[:96]}

    rewritten(folder, narrow, None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 96}))
    with refused(ValueError, "experts.0.gate_proj.weight", "square", "0 to 96 of 192 rows"):
        load(folder)


def test_calls_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    library = transformers()
    folder = make("squares", tmp_path / "published")
    with refused(ValueError, "activations='as stored'", "the files have none", "input_scale"):
        load(folder, activations="as stored")
    with refused(TypeError, "torch.float16"):
        load(folder, dtype=torch.float16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Nothing"]}))
    with refused(ValueError, "architectures=['Nothing']"):
        load(folder)
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)  # tensors say what they are
    coded = {
        name for name, weight in model.named_parameters() if isinstance(weight, fm.FP8Parameter)
    }
    assert fm.files.stored_weights(folder).keys() == coded
    floats = library.LlamaForCausalLM(
        library.LlamaConfig(**{k: v for k, v in config.items() if k != "dtype"})
    )
    with refused(ValueError, "no quantised layer"):
        save(floats, tmp_path / "trained")
    with refused(TypeError, "not a transformers model"):
        save(torch.nn.Linear(2, 2), tmp_path / "trained")
    floats.save_pretrained(tmp_path / "floats")
    assert fm.files.stored_weights(tmp_path / "floats") == {}
    with refused(ValueError, "has floats: give formats=", "from_pretrained"):
        load(tmp_path / "floats")
    (folder / "config.json").unlink()
    with refused(FileNotFoundError, "config.json"):
        load(folder)
    fm.dequantize_model(model)
    with refused(ValueError, "no quantised layer", "save_pretrained"):
        save(model, tmp_path / "trained")
