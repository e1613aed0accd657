"""The benchmark of a card runs from end to end without one.

It says what differs or fails.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from nanogpt_bench.config.settings import build_config
from nanogpt_bench.model.gpt import GPT, GPT_SIZES, GPTShape
from nanogpt_bench.monitors.resources import flops_per_token

FOLDER = Path(__file__).parent.parent / "benchmarks"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
PARTS = (
    "exact_steps",
    "exact_arrays",
    "exact_products",
    "step_calls",
    "layers",
    "kernels",
    "products",
)
PARTS += (
    "training_768",
    "training_2048",
    "one_block",
    "losses",
    "eight_billion",
    "launches",
    "step_times",
    "rivals",
)
PARTS += ("muon", "gpt2")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield import_module("gpu")
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("gpu", "_gpu", "_record")
    ]:
        sys.modules.pop(name)


@needs_triton
def test_a_dry_run_goes_through_every_part(tmp_path):
    out, recorded = tmp_path / "gpu.json", FOLDER.parent / "docs" / "measured" / "gpu.json"
    old_record = recorded.read_bytes()
    command = [sys.executable, str(FOLDER / "gpu.py"), "--dry", "--record", "--out", str(out)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "every bit is the CPU's" in process.stdout
    parts = {
        name: part["figures"]
        for name, part in json.loads(out.read_text(encoding="utf-8"))["parts"].items()
    }
    assert tuple(parts) == PARTS
    for name in PARTS[:2]:
        assert not any(parts[name].values()), name
    assert parts["launches"] == {"steps": 3}
    reference, *ratios = (row["loss over bfloat16's"] for row in parts["losses"].values())
    assert reference == 0
    assert all(abs(ratio) < 0.1 for ratio in ratios)
    rows = parts["eight_billion"]
    assert {name.split(", ")[1] for name in rows} >= {"StiffnessMuon", "StiffnessAdamW"}
    assert all(row["loss"] < row["first loss"] for row in rows.values())
    assert recorded.read_bytes() == old_record  # a dry run records nothing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_it_says_so():
    process = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py")], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == "gpu.py: there is no GPU here: --dry runs it on a CPU"


def test_a_part_that_fails_leaves_the_others_and_the_file(gpu, tmp_path):
    def exact_broken(session):
        raise ValueError("broken")

    def exact_other(session):
        return {"E4M3": 2, "E5M2": 0, "sums": {"count": 1, "largest share of the bound": 1.7}}

    def rows_of(session):
        return {"first": {"ms": 1.23456, "peak GB": "out of memory"}, "second": {"error": "killed"}}

    parts = tuple(gpu.Part(part, 1) for part in (exact_broken, exact_other, rows_of))
    result = gpu.run_parts(gpu.Session(True), parts, tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == result
    assert gpu.failures(result) == [
        *("exact_broken: ValueError: broken", "exact_other: E4M3 differs in 2"),
        *("exact_other: sums differs in 1", "rows_of: second: killed"),
    ]
    del result["parts"]["exact_broken"]
    columns = ["what", *gpu.PAGE_COLUMNS]
    rows = [
        {c: x for c, x in zip(columns, row, strict=True) if x is not None}
        for row in gpu.page_rows(result)
    ]
    assert rows[0] == {"what": "other: values that differ from the CPU's", "count": 3}
    assert rows[1] == {"what": "rows_of: first", "a call, ms": 1.235, "peak GB": "out of memory"}


def test_a_wrong_code_and_a_wrong_product_are_found(gpu, monkeypatch):
    bits, session = sys.modules["_gpu.bits"], gpu.Session(True)
    assert bits.differing_conversions(session) == 0
    assert len(bits.values_of_bfloat16()) == 2 * (0x43E0 + 1)  # to 448, of either sign
    wrong = bits.beyond_the_bound(session, (32, 64, 48), "decoded")
    assert wrong == {"count": 0, "largest share of the bound": 0.0}
    encode, rounded, copied = bits.fm.encode, bits.fm.round_to_grid, []

    def one_higher(x, *args):
        codes = encode(x, *args)
        codes[5000] += 1
        return codes

    def one_off(x, *args):
        return torch.cat([rounded(x[:-1], *args), rounded(x[-1:], *args) / 2])

    def one_code_off(layer):
        # The first copy stays as it is, the second has another code.
        layer[0].weight.codes[3, 5] ^= 8 * len(copied)
        copied.append(layer)
        return layer

    assert bits.differing_in_a_layer(session) == 0
    monkeypatch.setattr(bits.fm, "encode", one_higher)
    monkeypatch.setattr(bits.fm, "round_to_grid", one_off)
    assert bits.differing_conversions(session) == bits.differing_in_a_layer(session) == 1
    monkeypatch.setattr(bits.copy, "deepcopy", one_code_off)
    wrong = bits.beyond_the_bound(session, (32, 64, 48), "decoded")
    assert wrong["count"] > 8
    assert wrong["largest share of the bound"] > 1


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-2-7B", 6_738_415_616),
        ("Qwen2.5-14B", 14_770_033_664),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_llama_has_the_parameters_that_its_publisher_counts(name, count):
    llama = sys.modules["_gpu.llama"]
    with torch.device("meta"):
        model = llama.Llama(llama.LLAMA_SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == count


def test_flops_are_counted_as_the_bench_does(gpu):
    training = sys.modules["_gpu.training"]
    shape = GPTShape(2, 2, 32, 16, vocab_size=64, tie_weights=True)
    model = GPT(shape)
    config = build_config(
        {f"model.{name}": getattr(shape, name) for name in ("n_layer", "n_embd", "block_size")}
    )
    assert training.flops_per_token(model) == flops_per_token(model, config)
    with torch.device("meta"):
        gpt2 = GPT(GPT_SIZES["124M"])
    # 6 for each of 84.9M weights of the blocks and 38.6M of the head, which the lookup
    # shares; attention of 1,024
    assert (
        training.flops_per_token(gpt2)
        == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    )


def test_rows_of_eight_billion_are_for_cards_and_for_speed(gpu):
    """Eight billion weights under 12 and 16 GB, fourteen under 24, and both step lengths."""
    rows = sys.modules["_gpu.eight_billion"].TRAININGS
    assert {row.shape for row in rows} <= sys.modules["_gpu.llama"].LLAMA_SHAPES.keys()
    capped = {(row.shape, row.gigabytes) for row in rows if row.optimizer == "StiffnessAdafactor"}
    assert capped >= {("Llama-3.1-8B", 12), ("Llama-3.1-8B", 16), ("Qwen2.5-14B", 24)}
    timed = {(row.optimizer, row.tokens) for row in rows if row.shape == "Llama-3.1-8B"}
    for optimizer in ("StiffnessAdafactor", "StiffnessMuon", "StiffnessAdamW"):
        assert timed >= {(optimizer, 2048), (optimizer, 16_384)}


@pytest.mark.extra("transformers")
def test_llama_is_that_of_transformers(gpu):
    import transformers

    llama = import_module("_gpu.llama")
    torch.manual_seed(0)
    shape = llama.LLAMA_SHAPES["tiny"]
    sizes = {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
    }
    sizes |= {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rope_theta": shape.base,
    }
    model = llama.Llama(shape)
    config = transformers.LlamaConfig(**sizes, vocab_size=shape.vocabulary, rms_norm_eps=1e-5)
    published = transformers.LlamaForCausalLM(config)
    names = {"embedding": "embed_tokens", "blocks": "layers", "norm1": "input_layernorm"}
    names |= {"norm2": "post_attention_layernorm"} | {
        part: f"self_attn.{part}_proj" for part in "qkvo"
    }
    names |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    state = published.state_dict()
    for name, weight in model.state_dict().items():
        path = ".".join(names.get(part, part) for part in name.split("."))
        state[path if path.startswith("lm_head") else f"model.{path}"].copy_(weight)
    tokens = torch.randint(0, shape.vocabulary, (2, 17))
    expected = torch.nn.functional.cross_entropy(
        published(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
    )
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:], chunk=5), expected)
