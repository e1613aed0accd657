"""A run stopped after every one of its steps and taken up from disk each time.

It has the same bits as without a stop.
"""

import itertools
import signal
from itertools import product

import pytest
import torch
from covering import covering
from small_runs import contents_bits, recorded

from nanogpt_bench.checkpoint import newest, read_checkpoint
from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import MOMENTS, WRITEBACKS
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.data.tokenizers import ByteTokenizer
from nanogpt_bench.data.write import LabelledText, write_corpus
from nanogpt_bench.loop import resume as run_state
from nanogpt_bench.loop.train import run
from nanogpt_bench.system.signals import StopRequest

SHORT_STEPS, LONG_STEPS = 4, 50
OWN_RULES = (
    "adamw",
    "sgd",
    "stiffness_adamw",
    "stiffness_sgd",
    "stiffness_lion",
    "riemannian_adam",
)
OWN_RULES = (*OWN_RULES, "riemannian_sgd", "fisher")
GRANULARITIES = ("tensor", "channel", "block")
POLICIES = ("dynamic", "static", "delayed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torchao.*", "ignore:.*Enum.*"),
    pytest.mark.filterwarnings("ignore::fp8manifold.SaturationWarning"),
]


E4M3 = {"model.format": "E4M3"}


def optimizer_group(optimizer, writeback, storage, moments, granularity, fmt):
    course = (
        {"optimizer.stiffness": 1.0, "optimizer.stiffness_end": 0.0}
        if optimizer == "stiffness_adamw"
        else {}
    )
    model = {
        "model.storage": storage,
        "model.granularity": granularity,
        "model.formats": f"{{attn: {fmt}, mlp: {fmt}}}",
    }
    return (
        model
        | {
            "optimizer.name": optimizer,
            "optimizer.writeback": writeback,
            "optimizer.moments": moments,
        }
        | course
    )


def sample_of_own():
    """Every optimizer with every write-back that the library takes with it.

    All other choices come in turn.
    """
    pairs = itertools.product(OWN_RULES, WRITEBACKS)
    # errors need an average that can hold them
    pairs = [(o, w) for o, w in pairs if w != "momentum" or o != "stiffness_lion"]
    for index, (optimizer, writeback) in enumerate(pairs):
        storage = "grid" if index % 3 == 2 else "codes"
        granularity = GRANULARITIES[index % (2 if storage == "grid" else 3)]
        moments = MOMENTS[(index // 2) % (2 if writeback == "momentum" else 3)]
        yield (
            optimizer,
            writeback,
            storage,
            moments,
            granularity,
            ("E4M3", "E5M2", "E3M4", "E7M0")[index % 4],
        )


def master(policy, granularity):
    """A policy with a granularity, in all four operands.

    Stochastic rounding counts its draws.
    """
    # What flows changes its rows from batch to batch: a scale that looks back has to be
    # the tensor's.
    flowing = f"policy: {policy}, granularity: {granularity if policy == 'dynamic' else 'tensor'}"
    weight = f"{{format: E4M3, policy: {policy}, granularity: {granularity}}}"
    gradient = f"{{format: E5M2, rounding: stochastic, {flowing}}}"
    spec = f"{{weight: {weight}, activation: {{format: E4M3, {flowing}}}, gradient: {gradient}}}"
    optimizer = ("adamw", "sgd")[POLICIES.index(policy) % 2]
    formats = {"model.formats": f"{{attn: {spec}, mlp: {spec}}}", "optimizer.name": optimizer}
    return {**formats, "model.storage": "master", "train.accumulation": 2}


GLOBAL = "{weight: E4M3, activation: E4M3, gradient: {format: E5M2, scale: global}}"
PEER = {"model.n_embd": 128, "train.precision": "float32"}
END = {"optimizer.writeback_end": "residual8", "optimizer.step_at": 0.5, **E4M3}
WITHIN = {"train.step_in_backward": True, "optimizer.grad_clip": 0, **E4M3}
CLIPPED = WITHIN | {"rule": "stochastic-8bit", "optimizer.grad_clip": 0.02}
OPERANDS = "{'*': {weight: E4M3, activation: E4M3, gradient: E5M2}, lm_head: none}"
#: documents and their labels, with validations and monitors on the way
CLASSIFYING = {
    "float": {"rule": "fp32"},
    "one-byte": {"rule": "stochastic", **E4M3},
    "residual": {
        "rule": "residual8",
        "model.format": "E7M0",
        "shadow.enabled": True,
        "shadow.interval": 2,
    },
    "operands": {"model.formats": OPERANDS},
    "head-only": {"rule": "stiffness", "model.formats": "{lm_head: E5M2}", "train.accumulation": 2},
    "muon": {"rule": "muon-stochastic", **E4M3},
    "bfloat16": {"rule": "bf16-pure"},
}
OTHER_RUNS = {
    **{
        f"{name}-continuous": {"optimizer.name": name, "model.storage": "continuous", **E4M3}
        for name in ("stiffness_adamw", "stiffness_sgd", "riemannian_adam")
    },
    "master-global": {"model.formats": f"{{attn: {GLOBAL}, mlp: {GLOBAL}}}"},
    **{
        f"baseline-{name}": {
            "rule": name,
            "model.n_embd": 64,
            **(PEER if rule.storage == "peer" else {}),
        }
        for name, rule in RULES.items()
        if rule.storage in ("float32", "peer")
    },
    # weights on geoopt's manifolds, through a copy and beside one-byte weights
    "stiefel-copy": {"model.constraint": "stiefel", **E4M3},
    "sphere-one-byte": {
        "model.constraint": "sphere",
        "rule": "riemannian",
        "model.formats": "{'*': E4M3, attn: none}",
    },
    # another write-back for the last steps, steps in the backward pass and what they
    # keep, other monitors
    "writeback-end-muon-stochastic": {"rule": "muon-stochastic", **END},
    "writeback-end-stochastic-8bit": {"rule": "stochastic-8bit", **END},
    "in-backward": {"rule": "stochastic", **WITHIN},
    "in-backward-clipped": {**CLIPPED, "optimizer.clip_by": "previous"},
    "in-backward-summed": {**CLIPPED, "train.accumulation": 2},
    "without-trend": {"rule": "stochastic", "monitor.watch": "[stall]", **E4M3},
    "monitors-in-turn": {
        "rule": "stochastic",
        "monitor.turns": 3,
        "monitor.interval": 1,
        "train.max_steps": 6,
        **E4M3,
    },
    **{
        f"classify-{name}": {"task": "classify", **settings}
        for name, settings in CLASSIFYING.items()
    },
}
SHADOW = {"shadow.enabled": True, "shadow.interval": 7, "train.max_steps": LONG_STEPS}
LONG = {
    "stochastic-8bit": {"rule": "stochastic-8bit", **SHADOW, **E4M3},
    "residual8": {"rule": "residual8", **SHADOW, **E4M3},
    "bf16-mixed": {"rule": "bf16-mixed", **SHADOW},
}
MASTER = list(product(POLICIES, GRANULARITIES))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(
        f"Line {number}: {number * number % 97} foxes jump over {number % 7} dogs.\n"
        for number in range(200)
    )
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare_text(folder / "text.txt", folder / "prepared", "char")
    documents = [
        LabelledText(f"{'a' * (number % 5 + 2)} {number % 3} dogs", [number % 3])
        for number in range(60)
    ]
    splits = {"train": documents[:48], "val": documents[48:]}
    write_corpus(
        folder / "labelled",
        splits,
        ByteTokenizer(),
        {"kind": "made"},
        progress=False,
        labels=["a", "b", "c"],
    )
    return folder / "prepared"


def check_case(case, corpus, tmp_path):
    rule = case.get("rule") or ("fisher" if case.get("optimizer.name") == "fisher" else None)
    if rule is not None and rule not in available_rules():
        pytest.skip(f"{RULES[rule].needs} is not installed")
    small = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 8, "dropout": 0.1}
    settings = {"data.dir": corpus.parent / "labelled" if "task" in case else corpus}
    settings |= {f"model.{name}": value for name, value in small.items()}
    settings |= {
        "train.max_steps": SHORT_STEPS,
        "train.batch_size": 2,
        "optimizer.warmup_steps": 2,
        "monitor.interval": 2,
    }
    settings |= {
        "eval.interval": 2,
        "eval.batches": 1,
        "checkpoint.every": "null",
        "checkpoint.keep": 1,
        **case,
    }
    config = load_config(None, [f"--{key}={value}" for key, value in settings.items()])
    whole, parts, steps = tmp_path / "whole", tmp_path / "parts", config.train.max_steps
    with torch.compiler.set_stance(
        "force_eager"
    ):  # torchao's steps: the same without a minute of compiling
        run(config, whole)
        for step in range(steps + 1):
            torch.manual_seed(0)  # nothing may depend on what a process happens to hold
            request = StopRequest()
            request.note(signal.SIGTERM)
            summary = run(config, parts, resume=True, stop=request, say=lambda line: None)
            assert summary["status"] == ("stopped" if step < steps else "finished"), step
            assert summary["steps"] == step, step
    for part, undisturbed in zip(recorded(parts), recorded(whole), strict=True):
        assert part == undisturbed, f"step {undisturbed['step']}"
    alerts = [
        path.read_bytes() if path.exists() else None
        for path in (f / "alerts.jsonl" for f in (parts, whole))
    ]
    assert alerts[0] == alerts[1]
    first, second = (read_checkpoint(newest(folder)[0] or folder) for folder in (whole, parts))
    assert first.step == second.step
    assert first.metadata == second.metadata
    assert first.facts["state"]["optimizer"] == second.facts["state"]["optimizer"]
    assert first.tensors.keys() >= {"model", "random"}
    # a tensor of the monitors that is times
    same = (
        {
            k: v
            for k, v in contents_bits(state).items()
            if not k.endswith("ShadowObserver/overheads")
        }
        for state in (first, second)
    )
    assert next(same) == next(same)


def covered(make, values):
    """Return the cases of a matrix.

    In those of the default tier every value occurs; the others take minutes.
    """
    sample = covering(
        [dict(zip("abcdef", values_of_case, strict=False)) for values_of_case in values], 1
    )
    return [
        pytest.param(
            make(*values_of_case),
            id="-".join(values_of_case),
            marks=[] if place in sample else pytest.mark.slow,
        )
        for place, values_of_case in enumerate(values)
    ]


CASES = [*covered(optimizer_group, list(sample_of_own())), *covered(master, MASTER)]
CASES += [pytest.param(case, id=name) for name, case in OTHER_RUNS.items()]
CASES += [
    pytest.param(case, id=f"{LONG_STEPS}-steps-{name}", marks=pytest.mark.slow)
    for name, case in LONG.items()
]


@pytest.mark.parametrize("case", CASES)
def test_stopped_after_every_step(case, corpus, tmp_path):
    check_case(case, corpus, tmp_path)


def test_what_is_not_put_back_is_noticed(corpus, tmp_path, monkeypatch):
    """The comparison can fail.

    Without the optimizer's state, the same chain ends elsewhere.
    """
    monkeypatch.setattr(run_state, "_restore_optimizer", lambda *parts: None)
    with pytest.raises(AssertionError, match="step 2"):
        check_case({"rule": "stochastic", **E4M3}, corpus, tmp_path)
