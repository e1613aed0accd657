"""The plan of a sweep: labels of its points, no two alike, and references, each for what its points train on."""

from bench_runs import refusal
from sweep_runs import train_here

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import plan_sweep


def test_formats_of_all_layers_and_of_one_are_told_apart(write):
    axes = {"rule": ["fp32", "nearest"], "model.format": ["E4M3", "e7m0"]}
    axes |= {f"model.formats.{key}": ["none", "E5M2"] for key in ("lm_head", "*.activation")}
    planned = plan_sweep(read_sweep(write(axes=axes)))
    assert len({run.label for run in planned}) == len(planned) == 1 + 8
    assert {run.label for run in planned} >= {
        "E4M3 nearest lm_head=E5M2 activation=none",
        "E7M0 nearest lm_head=none activation=E5M2",
    }
    for run in planned[1:]:
        formats = resolve(build_config(run.settings)).model.formats
        assert run.label.startswith(formats["*"]["weight"])


def test_close_numbers_are_written_in_full_and_formats_under_a_rule_without_any_refused(write):
    axes = {"optimizer.lr": [0.001, 0.00100000001], "rule": ["fp32"]}
    labels = [run.label for run in plan_sweep(read_sweep(write(axes=axes)))]
    assert labels == ["fp32 lr=0.001", "fp32 lr=0.00100000001"]
    with refusal(r"axes\.model\.format: rule 'fp32' keeps float weights at every value"):
        plan_sweep(read_sweep(write(axes={"model.format": ["E4M3", "E7M0"]}, settings={"rule": "fp32"})))


BF16 = {"rule": "bf16-mixed"}


def planned(write, axes, **content):
    """The labels of the references, and of the points."""
    runs = plan_sweep(read_sweep(write(axes=axes, settings={"model.format": "E4M3"}, **content)))
    points = plan_sweep(read_sweep(write(axes=axes, settings={"model.format": "E4M3"})))
    own = {run.name for run in points}
    return [run for run in runs if run.name not in own], runs


def test_a_reference_trains_on_what_the_points_measured_against_it_train_on(write):
    axes = {"rule": ["nearest", "stochastic"], "optimizer.lr": [0.001, 0.002], "data.train_tokens": [1000, 2000]}
    axes |= {"train.max_steps": [3, 4], "seed": [1, 2]}
    references, runs = planned(write, axes, reference=BF16)
    assert len(runs) == 8 + 32
    assert runs[:8] == references
    found = {(run.settings["data.train_tokens"], run.settings["train.max_steps"], run.seed) for run in references}
    assert len(found) == 8
    assert {run.label for run in references} == {
        f"bf16-mixed train_tokens={tokens} max_steps={steps}" for tokens in (1000, 2000) for steps in (3, 4)
    }
    assert {resolve(build_config(run.settings)).optimizer.lr for run in references} == {0.002}


def test_a_point_that_is_the_reference_is_trained_once_and_one_of_its_name_stays_another(write):
    axes = {"rule": ["fp32", "nearest"], "train.max_steps": [3, 4]}
    references, runs = planned(write, axes, reference={"rule": "fp32"})
    assert (references, len(runs)) == ([], 4)
    references, runs = planned(write, axes, reference={"rule": "fp32", "optimizer.weight_decay": 0.5})
    assert [run.label for run in references] == [f"fp32 max_steps={steps} (reference)" for steps in (3, 4)]
    assert len({run.name for run in runs}) == 6


def test_what_a_reference_does_without_is_said(write, capsys, monkeypatch):
    """The file's rate is the rules' on its axis: a reference that is given as settings has its own."""
    train_here(monkeypatch)
    own = {"optimizer.lr": 5e-5, "optimizer.weight_decay": 0.0}
    settings = {"model.format": "E4M3", "train.max_steps": 2}
    told = "the reference is trained with its rule's own optimizer.lr, optimizer.weight_decay, not the file's: set them"
    for reference, said in (({"rule": "fp32"}, True), ("E4M3 stochastic", False), ({"rule": "fp32"} | own, False)):
        path = write(axes={"rule": ["stochastic"]}, settings=settings | own, reference=reference)
        assert main(["sweep", str(path), "--out", f"out{said}{len(reference)}", "--workers", "1"]) == 0
        assert (told in capsys.readouterr().err) == said
