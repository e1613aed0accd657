"""The classes of failure, on constructed figures and in runs that provoke them.

The timeline.
"""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
import yaml
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import schema
from nanogpt_bench.config.rules import RULES, available_rules, stall_counts
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.failures import KINDS, classify, diagnose, failures_of, judge_run, read_evidence
from nanogpt_bench.failures.table import OVER_FIRST, OVER_MEDIAN, REST
from nanogpt_bench.loop.observers import AlertObserver
from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors.points import Step
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.plan import plan_point
from nanogpt_bench.sweep.record import SweepRecord

#: the settings the classification reads
CONFIG = {
    "rule": "nearest",
    "seed": 42,
    "model": {"storage": "codes", "block_size": 64, "formats": {"*": "E4M3"}},
    "optimizer": {"writeback": "nearest"},
    "train": {"batch_size": 12, "accumulation": 1},
}


#: a healthy training loss: from 5.5 nats down to 2.5 like a power of the step, wobbling
#: by 0.02
HEALTHY_LOSS = [2.2 + 3.3 * (step + 1) ** -0.5 + 0.02 * math.sin(7 * step) for step in range(200)]


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a run folder.

    It takes series per step by metric, of values or nulls.
    """

    def folder(name="run", *, series=None, loss=None, settings=None, alerts=(), summary=None):
        path = tmp_path / name
        path.mkdir()
        config = {
            key: {**value, **(settings or {}).get(key, {})} if isinstance(value, dict) else value
            for key, value in CONFIG.items()
        }
        config |= {key: dict(value) for key, value in (settings or {}).items() if key not in config}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        records = _records({"train/loss": HEALTHY_LOSS if loss is None else loss, **(series or {})})
        (path / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
        (path / "alerts.jsonl").write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
        content = {
            "name": name,
            "status": "finished",
            "failure": None,
            "format": "E4M3",
            **(summary or {}),
        }
        (path / "summary.json").write_text(json.dumps(content))
        return path

    return folder


def _records(series):
    """Records of steps 1, 2, ….

    A mapping gives the steps at which a metric was looked at.
    """
    by_step = {}
    for metric, values in series.items():
        for step, value in (
            values.items() if isinstance(values, dict) else enumerate(values, start=1)
        ):
            by_step.setdefault(step, {"step": step, "time/elapsed_s": 0.5 * step})[metric] = value
    return [by_step[step] for step in sorted(by_step)]


LOOKS = range(20, 201, 20)


def at_looks(*values):
    """Values at steps 20, 40, …, the last one repeated up to step 200."""
    return dict(zip(LOOKS, [*values, *[values[-1]] * (len(LOOKS) - len(values))], strict=True))


def the(kind, findings):
    return next(finding for finding in findings if finding.kind == kind)


def judged(path, kind):
    return the(kind, classify(path))


#: everything the bench can watch, as a healthy run would show it
HEALTHY = {
    "grad/norm": [1.0 + 0.1 * (step % 3) for step in range(200)],
    "stall/update_lost": at_looks(0.2),
    "quant/overflow/weight": at_looks(0.0),
    "quant/clamped/activation": at_looks(0.001),
    "quant/kurtosis/residual": at_looks(3.0, 4.0),
    "quant/kurtosis/activation": at_looks(6.0, 40.0),
    "attention/entropy": at_looks(3.0, 2.0),
    "grad/zero": at_looks(0.1),
    "grad/dead": at_looks(0.0),
    "loss_is_nan": [0] * 200,
    "grad_has_nan": [0] * 200,
    "train/excess": at_looks(0.0),
    "geometry/off_grid": at_looks(0.0),
}
#: class -> the figures that make it, and the step at which it must be found
FAILING = {
    "stall": ({"stall/update_lost": at_looks(0.2, 0.97)}, 40),
    "overflow": ({"quant/overflow/weight": at_looks(0.0, 0.0, 0.02)}, 60),
    "outlier_explosion": ({"quant/kurtosis/residual": at_looks(3.0, 5.0, 9.0, 40.0)}, 80),
    "attention_collapse": ({"attention/entropy": at_looks(3.0, 0.5, 0.2)}, 60),
    "zero_gradients": ({"grad/zero": at_looks(0.1, 0.95)}, 40),
    "exploding_gradients": ({"grad/norm": [1.0] * 150 + [500.0] * 50}, 151),
    "divergence": ({"train/excess": at_looks(0.0, 0.05, 0.2)}, 100),  # at the look that makes three
    "off_manifold": ({"geometry/off_grid": at_looks(0.0, 1e-9)}, 40),
    "nan": ({"grad_has_nan": [0] * 120 + [1] + [0] * 79}, 121),
}


def test_a_healthy_run_has_clear_classes_only(make):
    findings = classify(make(series=HEALTHY))
    assert [finding.kind for finding in findings] == list(KINDS)
    assert {finding.kind: finding.state for finding in findings} == dict.fromkeys(KINDS, "clear")
    assert failures_of(make("again", series=HEALTHY)) == []


@pytest.mark.parametrize("kind", FAILING)
def test_figures_beyond_the_threshold_are_found_alone_and_at_their_step_and_one_look_is_no_failure(
    make, kind
):
    figures, step = FAILING[kind]
    (entry,) = failures_of(make(kind, series=HEALTHY | figures))
    assert (entry["kind"], entry["step"]) == (kind, step)
    assert entry["evidence"]["message"]
    json.dumps(entry, allow_nan=False)
    if kind in ("nan", "off_manifold"):
        return  # one is enough: there is no mild NaN
    ((metric, failing),) = figures.items()
    first_step = step if isinstance(failing, dict) else step - 1
    once = HEALTHY[metric].copy()
    once[first_step] = failing[first_step]
    assert failures_of(make(f"{kind} once", series=HEALTHY | {metric: once})) == []


def test_what_was_not_recorded_is_not_judged_and_named(make):
    findings = classify(make())
    missing = {
        finding.kind: finding.missing for finding in findings if finding.state == "not judged"
    }
    assert missing["stall"] == ("stall/update_lost",)
    assert missing["attention_collapse"] == ("attention/entropy over that of uniform attention",)
    assert missing["zero_gradients"] == ("grad/norm", "grad/zero", "grad/dead")
    assert set(missing) == set(KINDS) - {"nan", "plateau", "divergence"}
    for kind, metrics in missing.items():
        assert metrics[0] in the(kind, findings).message, kind
    assert {finding.state for finding in classify(make("empty", loss=[]))} == {"not judged"}


@pytest.mark.parametrize(("turns", "state"), [(4, "found"), (1, "clear")])
def test_overflow_in_a_layer_that_is_looked_at_in_turn_lasts_until_its_next_turn(
    make, turns, state
):
    """The overflow is there in every fourth look.

    In layers that are always looked at that would be four looks apart.
    """
    shares = {step: 0.3 for index, step in enumerate(LOOKS) if index % 4 == 0}
    series = {"quant/overflow/gradient": at_looks(0.002), "quant/overflow/gradient/lm_head": shares}
    finding = judged(make(series=series, settings={"monitor": {"turns": turns}}), "overflow")
    assert (finding.state, finding.step) == (state, 20 if state == "found" else None)


def test_looks_before_the_first_and_the_last_steps_of_a_dying_run_are_judged(make):
    assert (
        judged(
            make(series={"quant/kurtosis/residual": at_looks(30.0, 40.0)}), "outlier_explosion"
        ).state
        == "clear"
    )
    one_look = make("one", series={"quant/kurtosis/residual": {200: 500.0}})
    assert judged(one_look, "outlier_explosion").state == "not judged"
    norms = [1.0] * 30 + [1e4]
    dead = make("dead", loss=[5.0] * 31, series={"grad/norm": norms}, summary={"status": "failed"})
    assert judged(dead, "exploding_gradients").step == 31
    alive = make("alive", loss=[5.0] * 31, series={"grad/norm": norms})
    assert judged(alive, "exploding_gradients").state == "clear"


def wobble(level, steps):
    return [level + 0.02 * (step % 2) for step in range(steps)]


LATE = [5.0 - 0.02 * step for step in range(150)] + wobble(2.0, 50)
FALLING = [5.5 - 3.0 * step / 99 for step in range(100)]
#: losses, the class that they are asked about, and the steps within which it is found,
#: if it is
COURSES = {
    "at rest early": ([5.5, 5.0, 4.5, 4.0, *wobble(3.5, 196)], "plateau", range(13)),
    "at rest late": (LATE, "plateau", None),
    "at rest early, just long enough": ([5.5, 4.5, *wobble(3.5, 28)], "plateau", range(13)),
    "risen again": ([5.0, 4.0, 3.0, *wobble(2.5, 60), *wobble(4.5, 137)], "plateau", None),
    "above its first": (
        [*wobble(5.0, 20), *wobble(9.0, 20), *wobble(3.5, 60)],
        "divergence",
        range(21, 25),
    ),
    "up from its lowest": ([*FALLING, *wobble(3.4, 100)], "divergence", range(101, 111)),
    "up and back": ([*FALLING, *wobble(3.4, 30), *wobble(2.4, 70)], "divergence", None),
    "null": ([5.0, 4.0, None], "nan", range(3, 4)),
}


@pytest.mark.parametrize("name", COURSES)
def test_the_course_of_a_loss_is_judged(make, name):
    loss, kind, steps = COURSES[name]
    finding = judged(
        make(name, loss=loss, summary={"status": "failed" if kind == "nan" else "finished"}), kind
    )
    assert finding.state == ("clear" if steps is None else "found")
    assert steps is None or finding.step in steps
    if name == "above its first":
        assert finding.evidence["extreme"] == pytest.approx(4.0, abs=0.1)
    if name == "null":
        assert finding.evidence["metric"] == "loss_is_nan"


def test_an_excess_over_a_loss_of_zero_is_beyond_every_share(make):
    """An absent share is a null in the record.

    Of fewer than three validations nothing is said.
    """
    assert (
        judged(
            make(series={"train/excess": {20: 0.0, 40: None, 60: None, 80: None}}), "divergence"
        ).step
        == 80
    )
    two = make("two", series={"train/excess": {20: 0.5, 40: 0.5}})
    assert judged(two, "divergence").state == "clear"


def test_no_plateau_is_judged_in_a_run_of_fewer_than_three_windows(make):
    short = make("short", loss=[5.5, 4.5, *wobble(3.5, 27)])
    assert judged(short, "plateau").state == "not judged"


def test_a_run_that_the_loop_ended_on_its_plateau_is_on_one_however_late(make):
    rest = {
        "status": "stopped",
        "stop": {"kind": "plateau", "message": "no fall in 5 validations", "step": 200},
    }
    finding = judged(make("rest", loss=LATE, summary=rest), "plateau")
    assert finding.step is not None
    assert 140 <= finding.step <= 155
    short = make("short", loss=[5.0, 4.0, *wobble(3.5, 18)], summary=rest)
    assert judged(short, "plateau").state == "found"


def test_a_run_that_goes_on_is_judged_by_as_many_looks_as_patience_asks_for(make):
    evidence = read_evidence(make(series={"stall/update_lost": {20: 0.9, 40: 0.9}}))
    states = [
        the("stall", list(judge_run(evidence, running=running))).state for running in (False, True)
    ]
    assert states == ["found", "clear"]


def test_criteria_alerts_and_end_come_in_the_order_of_steps(make):
    """Alerts of earlier runs have other names."""
    stalled = {"stall/update_lost": dict.fromkeys(range(20, 61, 10), 0.9)}
    alerts = [
        {"step": step, "level": "WARN", "kind": "kurtosis", "message": "kurtosis 14"}
        for step in (40, 60)
    ]
    failure = {"kind": "nan", "message": "train/loss is nan at step 61", "step": 61}
    summary = {"status": "failed", "failure": failure}
    diagnosis = diagnose(
        make(loss=[3.0] * 60 + [None], series=stalled, alerts=alerts, summary=summary)
    )
    events = [(event.step, event.source, event.kind) for event in diagnosis.timeline]
    assert events == [
        (1, "criterion", "plateau"),
        (20, "criterion", "stall"),
        (40, "alert", "kurtosis"),
        (61, "criterion", "nan"),
        (61, "end", "failed"),
    ]
    texts = [event.text for event in diagnosis.timeline]
    assert (texts[1], texts[-1]) == ("stall/update_lost 0.9 >= 0.5", failure["message"])
    assert [finding.kind for finding in diagnosis.found] == ["plateau", "stall", "nan"]
    json.dumps(asdict(diagnosis), allow_nan=False)


@pytest.mark.parametrize("kind", ["crash", "disk"])
def test_the_sweep_judges_what_a_dead_process_left_and_writes_nothing_where_a_full_disk_ended_it(
    make, tmp_path, kind
):
    path = make(
        "01-dead", loss=[5.0, 4.9, 30.0, 300.0], series={"grad/norm": [1.0, 1.2, 400.0, None]}
    )
    (path / "summary.json").unlink()
    record = SweepRecord(tmp_path / "out", "grid")
    record.folder = tmp_path
    run = plan_point({"train.max_steps": 100}, {"rule": "nearest", "model.format": "E4M3"})
    run = replace(run, name=path.name)
    record.note_failure(run, {"kind": kind, "message": "out of memory", "step": 1})
    assert (path / "summary.json").exists() == (kind == "crash")
    if kind == "crash":
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["status"], summary["failure"]["kind"]) == ("failed", "crash")
        steps_by_kind = {entry["kind"]: entry["step"] for entry in summary["failures"]}
        assert steps_by_kind == {"divergence": 3, "exploding_gradients": 3, "nan": 4}


LOSING = {"nearest", "sgd-nearest", "muon-nearest"}


def test_the_write_backs_are_the_librarys():
    """The configuration knows them without importing torch."""
    assert tuple(fm.optim.WRITEBACKS) == schema.WRITEBACKS
    assert (
        tuple(name for name, rule in fm.optim.WRITEBACKS.items() if rule.loses_updates)
        == schema.LOSING
    )


@pytest.mark.parametrize("rule", available_rules())
def test_a_rule_loses_steps_for_everybody_or_nobody(rule, tiny, make, tmp_path):
    quantized = RULES[rule].storage not in schema.WITHOUT_FORMATS
    folder = tmp_path / f"alerts of {rule}"
    folder.mkdir()
    config = resolve(tiny(rule=rule, **({"model__format": "E4M3"} if quantized else {})))
    storage, writeback = config.model.storage, config.optimizer.writeback
    lost = {"stall/update_lost": 0.99, "stall/update_lost/lm_head": 0.99}

    raised = []
    observer = AlertObserver(config, folder, lambda alert: raised.append(alert.kind))
    for number in range(1, 4):
        step = Step(number, nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        step.record.update(lost)
        observer.take_record(replace(step, number=number * config.monitor.interval))

    settings = {"model": {"storage": storage}, "optimizer": {"writeback": writeback}}
    series = {name: dict.fromkeys(range(20, 201, 20), value) for name, value in lost.items()}
    stall = next(
        f for f in classify(make(rule, series=series, settings=settings)) if f.kind == "stall"
    )

    assert (raised == ["stall"], stall.found) == (rule in LOSING, rule in LOSING)
    assert stall_counts(storage, writeback) == (rule in LOSING or storage not in ROUNDED)


def test_a_write_back_of_the_end_loses_steps_too(make):
    """Half of such a training is rounded to nearest."""
    lost = {"stall/update_lost": 0.99, "stall/update_lost/lm_head": 0.99}
    series = {name: dict.fromkeys(range(20, 201, 20), value) for name, value in lost.items()}
    optimizer = {"writeback": "stochastic", "writeback_end": "nearest"}
    settings = {"model": {"storage": "codes"}, "optimizer": optimizer}
    found = classify(make("stochastic", series=series, settings=settings))
    assert next(finding for finding in found if finding.kind == "stall").found


def master(scale="", settings=""):
    """E4M3 weights and activations, the latter at a scale if one is given."""
    activation = f"{{format: E4M3, scale: {scale}}}" if scale else "E4M3"
    return {
        "rule": "master",
        "model__formats": f"{{'*': {{weight: E4M3, activation: {activation}{settings}}}}}",
    }


WIDE = {
    "model__n_embd": 64,
    "optimizer__schedule": "constant",
}  # for one feature to stand far above the others
ACTIVATION_SCALE = 0.01  # about what the amax of the tiny model's activations asks for
#: name -> settings of a run, of 30 steps
SETTINGS = {
    "float": {"rule": "fp32", "optimizer__lr": 0.02, "train__max_steps": 40},
    "one byte": {
        "rule": "stochastic",
        "model__format": "E4M3",
        "optimizer__lr": 0.02,
        "train__max_steps": 40,
    },
    "frozen": {"rule": "nearest", "model__format": "E7M0", "optimizer__lr": 0.002},
    "lr x 100": {"rule": "fp32", "optimizer__lr": 2.0},
    "unclipped sgd": {
        "rule": "sgd",
        "optimizer__lr": 3.0,
        "optimizer__grad_clip": 0,
        "monitor__interval": 1,
        **WIDE,
    },
    "lr of nothing": {"rule": "fp32", "optimizer__lr": 1e-7},
    "no straight-through": master(settings=", ste: none"),
    "scale 2^20 too small": master(ACTIVATION_SCALE * 2**-20),
    "scale as it should be": {
        **master(ACTIVATION_SCALE),
        "optimizer__lr": 0.02,
        "train__max_steps": 30,
    },
}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Return a function from a name to the folder of its run, done once."""
    folder = tmp_path_factory.mktemp("provoked")

    def finding_of(name):
        path = folder / name
        if not path.exists():
            run(tiny(**{"train__max_steps": 30} | SETTINGS[name]), path)
        return path

    return finding_of


@pytest.mark.parametrize("name", ["float", "one byte", "scale as it should be"])
def test_a_healthy_run_shows_none(runs, name):
    assert not diagnose(runs(name)).found
    states = {finding.kind: finding.state for finding in classify(runs(name))}
    assert {state for kind, state in states.items() if kind != "off_manifold"} == {"clear"}
    assert states["off_manifold"] == ("clear" if name == "one byte" else "not judged")


#: by run: classes found, and of the last of them its step, metric, and the ends of a
#: figure of its evidence
PROVOKED = {
    "frozen": (["stall"], 2, "stall/update_lost", "mean", 0.9, 1.0),
    "lr x 100": (["attention_collapse", "divergence"], None, OVER_FIRST, "extreme", 5, 1e9),
    "unclipped sgd": (
        ["divergence", "nan", "exploding_gradients"],
        None,
        OVER_MEDIAN,
        "extreme",
        100,
        1e99,
    ),
    "lr of nothing": (["plateau"], 1, REST, "extreme", 0, 0.5),
    "no straight-through": (["zero_gradients"], 1, "grad/norm", "extreme", 0, 0),
    "scale 2^20 too small": (["overflow"], None, "quant/overflow/activation", "extreme", 0.9, 1.0),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_class_is_found_in_the_run_that_provokes_it(runs, name):
    expected, step, metric, figure, low, high = PROVOKED[name]
    findings = {finding.kind: finding for finding in diagnose(runs(name)).found}
    assert findings.keys() >= set(expected)
    if name in ("frozen", "lr of nothing"):
        assert list(findings) == expected
    last = findings[expected[-1]]
    assert step in (None, last.step)
    assert last.evidence["metric"] == metric
    assert low <= float(last.evidence[figure] or 0) <= high
    if name == "frozen":
        assert str(last.evidence["worst_layer"]).startswith("blocks.0.")
    if name == "unclipped sgd":
        assert (last.step or 0) < (findings["nan"].step or 0)
