"""README's lines that fine-tune a Hugging Face model run.

They are the rule that was measured, and take the memory that is stated.
"""

import ast
import copy
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from fp8_folders import make, tensors_of

import fp8manifold as fm
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import Corpus
from nanogpt_bench.model.causal import load_causal
from nanogpt_bench.setup.memory import held_bytes
from nanogpt_bench.setup.optimizers import build_optimizer, lr_factor
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.sweep.file import find_sweep, read_sweep

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
MEMORY_PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
#: of the measured training
STEPS, TOKENS, RULE = 200, 256, "stochastic-8bit"
NAME = "HuggingFaceTB/SmolLM2-135M"
#: layers, width, inner width, vocabulary, width of all queries, and of all keys
SHAPE = (2, 64, 96, 128, 64, 32)


def recipe(page, heading=""):
    block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL).search(
        page, page.index(heading)
    )
    assert block is not None
    return block[1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random model of SmolLM2's kind.

    Keys are narrower than queries, the head is tied to the embedding.
    """
    layers, width, inner, vocabulary, queries, keys = SHAPE
    heads = {"num_attention_heads": queries // 16, "num_key_value_heads": keys // 16}
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    config = transformers.LlamaConfig(
        **sizes, **heads, tie_word_embeddings=True, max_position_embeddings=512
    )
    folder = tmp_path_factory.mktemp("recipe") / "llama"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(code, llama):
    """Run the lines over a few batches of one text and return their names.

    The model's name is replaced.
    """
    text = torch.randint(128, (1, 33), generator=torch.Generator().manual_seed(1))
    old_loss = transformers.AutoModelForCausalLM.from_pretrained(llama)(
        input_ids=text, labels=text
    ).loss.item()
    names = {"batches": [text] * 40, "before": old_loss}
    assert code.count(NAME) == 1
    exec(compile(code.replace(NAME, llama.as_posix()), "README.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def ran(llama):
    return run(recipe(README), llama)


@pytest.fixture(scope="module")
def ran_plainly(llama):
    """The lines of the page on fine-tuning, for which all gradients are there at once."""
    lines = recipe(README).splitlines(keepends=True)
    loop = lines.index(next(line for line in lines if line.startswith("for ")))
    opening = "".join(line for line in lines[:loop] if "step_in_backward" not in line)
    return run(opening + recipe(PAGE, "**The plain loop.**"), llama)


def test_the_lines_stand_on_both_pages():
    assert recipe(PAGE, "## From floats") == recipe(README)


def test_the_lines_run_twice_over_one_model_once_the_handle_is_removed():
    """As cells of a notebook do: the old scheduler keeps the old optimizer."""
    begin, loop = recipe(README).index("optimizer ="), recipe(README).index("for tokens")
    cell = compile(recipe(README)[begin:loop], "README.md", "exec")
    names = {"model": fm.quantize_model(torch.nn.Linear(4, 2), "E4M3"), "fm": fm, "torch": torch}
    exec(cell, names)
    with pytest.raises(RuntimeError, match=r"call remove\(\) of that .*handle.* the scheduler"):
        exec(cell, names)
    names["handle"].remove()
    exec(cell, names)
    names["model"](torch.ones(1, 4)).sum().backward()
    names["optimizer"].step()
    assert names["optimizer"].param_groups[0]["previous_norm"] > 0


def test_the_lines_for_an_fp8_checkpoint_train_it(tmp_path):
    """The page's lines write what was learnt in the layout that was read.

    The model's name is replaced.
    """
    published, trained = make("squares, tied", tmp_path / "published"), tmp_path / "trained"
    text = torch.randint(96, (1, 33), generator=torch.Generator().manual_seed(1))
    code = recipe(PAGE, "## From FP8").replace("Qwen/Qwen3-4B-FP8", published.as_posix())
    code = code.replace('"trained"', repr(str(trained))).replace("lr=5e-5", "lr=5e-3")
    exec(compile(code, "finetune.md", "exec"), {"batches": [text] * 20})
    decoded = {
        "quantization_config": transformers.FineGrainedFP8Config(dequantize=True),
        "dtype": torch.float32,
    }
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    old_loss, new_loss = (
        from_pretrained(source, **decoded)(input_ids=text, labels=text).loss
        for source in (published, trained)
    )
    assert new_loss < old_loss - 0.5
    assert (trained / "config.json").read_bytes() == (published / "config.json").read_bytes()
    kinds = [
        {name: (t.dtype, t.shape) for name, t in tensors_of(folder).items()}
        for folder in (published, trained)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("lines", ["ran", "ran_plainly"])
def test_the_ten_lines_train(lines, request):
    """Every matrix is in codes, the embedding too, and no gradient is left."""
    names = request.getfixturevalue(lines)
    text, model = names["batches"][0], names["model"]
    assert model(input_ids=text, labels=text).loss.item() < names["before"] - 0.02
    codes = {
        name: p.codes.dtype
        for name, p in model.named_parameters()
        if isinstance(p, fm.FP8Parameter)
    }
    assert codes == {name: torch.uint8 for name, p in model.named_parameters() if p.dim() > 1}
    assert len(codes) == 7 * SHAPE[0] + 1
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in model.parameters())
    steps = {float(state["step"]) for state in names["optimizer"].state.values()}
    # The first of README's 40 passes only measures the norm.
    assert steps == {39.0 if lines == "ran" else 40.0}


def test_steps_in_backward_are_those_of_the_plain_loop_but_for_the_clipping(ran, ran_plainly):
    options, plain_options = (names["optimizer"].param_groups[0] for names in (ran, ran_plainly))
    assert {**options, "previous_norm": None} == {
        **plain_options,
        "previous_norm": None,
        "params": options["params"],
    }
    assert "previous_norm" not in plain_options


def test_the_lines_for_a_card_train_and_what_they_save_is_read(llama, tmp_path):
    """The lines of 7B leave everything but norms in codes, and no gradient.

    The model's name is replaced.
    """
    text = torch.randint(128, (1, 33), generator=torch.Generator().manual_seed(1))
    names = {"batches": [text] * 60, "device": "cpu"}
    code = recipe(MEMORY_PAGE, "### 7B on 24 GB").replace(
        "meta-llama/Llama-2-7b-hf", llama.as_posix()
    )
    code = code.replace("lr=2e-4", "lr=5e-3").replace(
        '"trained"', repr((tmp_path / "trained").as_posix())
    )
    assert code.count(llama.as_posix()) == 1
    old_loss = transformers.AutoModelForCausalLM.from_pretrained(llama)(
        input_ids=text, labels=text
    ).loss.item()
    exec(compile(code, "finetune.md", "exec"), names)
    model = names["model"]
    assert model(input_ids=text, labels=text).loss.item() < old_loss - 0.1
    floats = [name for name, p in model.named_parameters() if not isinstance(p, fm.FP8Parameter)]
    assert all("norm" in name for name in floats)
    assert {type(p.grad).__name__ for p in model.parameters()} == {
        "SpentGradient"
    }  # nothing of it is in memory
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "trained", dtype=torch.bfloat16
    )
    assert torch.equal(again(input_ids=text).logits, model.eval()(input_ids=text).logits)


def lines_that_save():
    """Return the page's lines that save a model, by their folders."""
    code = recipe(PAGE, "## Save, and resume")
    lines = [ast.get_source_segment(code, statement) for statement in ast.parse(code).body]
    return {re.findall('"(.*?)"', line)[0]: line for line in lines}


READERS = {
    # floats, with what brings back their codes
    "trained": transformers.AutoModelForCausalLM.from_pretrained,
    # codes alone
    "codes": fm.load,
    # codes for others
    "served": transformers.AutoModelForCausalLM.from_pretrained,
}


@pytest.mark.parametrize("folder", READERS)
def test_each_way_of_saving_keeps_what_the_model_computes(folder, ran, tmp_path):
    tokens, trained = torch.arange(8).view(1, 8), copy.deepcopy(ran["model"]).eval()
    logits = trained(input_ids=tokens).logits
    path = tmp_path / folder
    line = lines_that_save()[folder].replace(f'"{folder}"', repr(path.as_posix()), 1)
    exec(compile(line, "finetune.md", "exec"), {"model": trained, "fm": fm})
    reloaded = READERS[folder](path, dtype=torch.bfloat16)
    assert torch.equal(reloaded.eval()(input_ids=tokens).logits, logits)


def test_the_page_has_three_ways_of_saving():
    assert lines_that_save().keys() == READERS.keys()


def test_the_ten_lines_are_the_rule_that_was_measured(ran, llama):
    """The ten lines have the sweep's options, rates, clipping and weights.

    The embedding in codes is the bench's option.
    """
    base = read_sweep(find_sweep("finetune_rules.yaml")).base
    settings = {key: value for key, value in base.items() if value is not None}
    settings |= {
        "rule": RULE,
        "model.pretrained": llama,
        "model.embeddings": "E4M3",
        "model.tied": "leave",
    }
    settings |= {"train.step_in_backward": "true", "optimizer.clip_by": "previous"}
    config = resolve(load_config(None, [f"--{key}={value}" for key, value in settings.items()]))
    model = quantize(load_causal(str(llama)), config)
    defaults = {name: value for name, value in ran["optimizer"].defaults.items() if name != "seed"}
    for group in build_optimizer(model, config).param_groups:
        assert {name: group[name] for name in defaults} == defaults | {"lr": 5e-5}
    (factor,) = ran["schedule"].lr_lambdas
    rates = [lr_factor(config.optimizer, step, STEPS) for step in range(STEPS)]
    assert [factor(step) for step in range(STEPS)] == pytest.approx(rates)
    clipping = f'clip="{config.optimizer.clip_by}", max_norm={config.optimizer.grad_clip}'
    assert f"step_in_backward(optimizer, {clipping}" in recipe(README)
    assert f"# {STEPS} tensors of token ids, (1, {TOKENS + 1}) each" in recipe(README)
    assert (config.train.max_steps, config.train.batch_size, config.model.block_size) == (
        STEPS,
        1,
        TOKENS,
    )

    def storage_of(model):
        return {
            name: (weight.format, tuple(weight.scale.shape), weight.rounding)
            for name, weight in model.named_parameters()
            if isinstance(weight, fm.FP8Parameter)
        }

    assert storage_of(ran["model"]) == storage_of(model)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in ran["model"].named_parameters()} == names


@pytest.fixture
def cards(monkeypatch):
    for folder in ("docs", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return import_module("_cards")


@pytest.mark.parametrize(
    ("way", "most"),
    [("adafactor-codes", 1.3), ("adafactor-bfloat16", 2.3), ("adafactor-torch", 2.3)],
)
def test_ways_of_adafactor_learn_in_little_more_than_the_bytes_of_weights(
    way, most, llama, monkeypatch
):
    """This small model has more rows for its weights than a real one."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    code = import_module("recipe").code_of(way, Path(NAME), seed=7)
    names = run(code.replace("lr=1e-3", "lr=5e-2"), llama)
    model = names["model"]
    after = model(input_ids=names["batches"][0], labels=names["batches"][0]).loss.item()
    assert after < names["before"] - 0.3
    bytes_held = held_bytes(model, names["optimizer"])
    assert bytes_held <= most * sum(p.numel() for p in model.parameters())


def test_the_benchmark_runs_the_lines_of_readme_beside_adamw(cards, llama):
    measured = import_module("recipe")
    corpus = Corpus(llama, *(np.arange(700, dtype=np.uint16) * 7 % 128 for _ in range(2)), {})
    code = measured.code_of("readme", llama, 7).replace(llama.as_posix(), NAME)
    assert code.replace(", seed=7", "") == recipe(README)
    ways = ("readme", "float32", "bfloat16")
    untrained, results = (
        {way: measured.train_way(way, llama, corpus, 7, steps) for way in ways} for steps in (0, 12)
    )
    assert all(results[way]["loss"] < untrained[way]["loss"] - 0.01 for way in ways)
    floats = {"optimizer": "torch_adamw", "storage": "float"}
    options = ({}, floats | {"dtype": "float32"}, floats)
    for way, chosen in zip(ways, options, strict=True):
        needed = fm.memory_needed(llama, **chosen)
        lasting = needed.weights + needed.state
        assert results[way]["bytes"] == pytest.approx(lasting, rel=0.02), way
    assert results["float32"]["loss"] == results["float32"]["loss_in_float32"]
    assert results["readme"]["loss"] == pytest.approx(
        results["readme"]["loss_in_float32"], abs=0.01
    )


def test_recorded_losses_are_what_the_tables_read(cards, monkeypatch, tmp_path):
    """A way that was not run with a seed has no cell there, and no difference."""
    measured, recorder = import_module("recipe"), import_module("_record")
    monkeypatch.setattr(recorder, "MEASURED_FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks" / "recipe.py"), "--record"])
    losses = {"float32": (2.1, 2.2), "bfloat16": (2.6,), "readme": (2.12, 2.24)}
    runs = []
    for way, of_way in losses.items():
        for seed, loss in zip((42, 43), of_way, strict=False):
            runs.append({"way": way, "seed": seed, "loss": loss, "bytes": 8})
    measured.record_runs(runs, tuple(losses), (42, 43))
    monkeypatch.setattr(cards, "MEASURED_FOLDER", tmp_path)
    assert cards.final_losses("readme") == [2.12, 2.24]
    rows = cards.recipe_rows()
    assert rows["readme"]["minus float32"] == "+0.030 ± 0.127"
    assert rows["bfloat16"]["minus float32"] == "+0.500"
    assert rows["bfloat16"]["seed 43"] is None


def test_the_tables_of_memory_are_those_of_the_arithmetic_which_gives_what_was_measured(cards):
    assert all(cards.recipe_table() in page for page in (README, PAGE))
    assert cards.readme_table() in README
    assert cards.measured_table() in MEMORY_PAGE
    assert cards.memory_table() in MEMORY_PAGE
    size = cards.MODELS["SmolLM2-135M"]
    options = {"dtype": "float32", "embeddings": False}
    exact = fm.memory_needed(
        size, "torch_adamw", storage="float", dtype="float32", in_backward=False
    )
    adam, muon = (fm.memory_needed(size, name, **options) for name in ("adamw", "muon"))
    assert exact.parameters == 134_515_008
    every, largest = 4 * exact.parameters, 4 * size["vocab_size"] * size["hidden_size"]
    counted = [(exact, every), (adam, every), (adam, largest), (muon, largest)]
    for (needed, gradients), (name, sizes) in zip(counted, cards.MEASURED.items(), strict=True):
        lasting = needed.weights + needed.state
        assert [size / 2**20 for size in (lasting, lasting + gradients)] == pytest.approx(
            sizes, abs=1.0
        ), name


def test_ways_of_training_stand_best_first(cards):
    for model in cards.README_MODELS[-1:]:
        peaks = [cards.needed(model, way).peak for way in cards.best_first(model)]
        assert peaks == sorted(peaks)
    assert {"bfloat16 stochastic, Adafactor, steps in backward"} <= {*cards.way_names()}


def check_arithmetic(model, optimizer, needed, rel):
    """After a step, what is held is what is counted."""
    tokens = torch.arange(16).view(1, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    gradients = [p.grad.nbytes for p in model.parameters() if p.grad is not None]
    optimizer.step()
    assert sum(gradients) == needed.gradients
    # What a layer has one of (a step, a counter, a table of inverse frequencies) counts
    # for little in a larger model.
    assert held_bytes(model, optimizer) == pytest.approx(needed.weights + needed.state, rel=rel)


@pytest.mark.parametrize("rule", ["adamw", "muon", "lion", "adafactor"])
def test_the_arithmetic_gives_what_a_live_model_holds(llama, rule):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    # of one token, so that all gradients and the step are the most
    needed = fm.memory_needed(
        llama, rule, dtype="float32", embeddings=False, in_backward=False, tokens=1, chunk=1
    )
    assert needed.parameters == sum(p.numel() for p in model.parameters())
    fm.quantize_model(model, "E4M3", storage="codes", tied="leave")
    options = {"lr": 1e-3, "moments": "8bit"}
    optimizer = {
        "adamw": lambda: fm.optim.StiffnessAdamW(model.parameters(), **options),
        "muon": lambda: fm.optim.StiffnessMuon.for_model(model, **options),
        "lion": lambda: fm.optim.StiffnessLion(model.parameters(), **options),
        "adafactor": lambda: fm.optim.StiffnessAdafactor(model.parameters(), lr=5e-4),
    }[rule]()
    check_arithmetic(model, optimizer, replace(needed, gradients=4 * needed.parameters), rel=0.02)


def test_the_arithmetic_gives_what_a_live_mixture_in_bfloat16_holds():
    """Experts, the embedding and the head in codes, and all that is small in bfloat16."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    experts = {
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    settings = transformers.Qwen3MoeConfig(
        **sizes, **experts, vocab_size=256, tie_word_embeddings=False
    )
    needed = fm.memory_needed(settings, "muon")
    model = transformers.Qwen3MoeForCausalLM(settings).bfloat16()
    assert needed.parameters == sum(p.numel() for p in model.parameters())
    fm.quantize_model(model, "E4M3", storage="codes", parameters="*.experts.*", embeddings="E4M3")
    optimizer = fm.optim.StiffnessMuon.for_model(model, lr=1e-3, moments="8bit")
    check_arithmetic(model, optimizer, replace(needed, gradients=2 * needed.parameters), rel=0.03)


#: measured and counted within 5% of each other; the others are in docs/measured/fits.json
SMALL_WAYS = ("one_byte_adamw", "one_byte_muon", "one_byte_adafactor", "adamw8bit")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux has it")
@pytest.mark.parametrize("way", SMALL_WAYS)
def test_peaks_of_real_steps_are_within_five_percent(cards, way):
    fits = import_module("fits")
    counted = fits.predicted(fits.MODELS["llama"], fits.WAYS[way]).peak
    assert fits.measured_bytes("llama", way) == pytest.approx(counted, rel=0.05)


def test_recorded_peaks_are_within_five_percent():
    facts = json.loads((ROOT / "docs/measured/fits.json").read_text(encoding="utf-8"))
    ratios = [row[facts["columns"].index("ratio")] for row in facts["rows"]]
    assert len({row[0] for row in facts["rows"]}) == 3
    assert ratios == pytest.approx([1] * len(ratios), abs=0.05)
