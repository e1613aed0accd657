"""The page is one file that needs no network.

It carries small curves, and shows every text as text.
"""

import time
from itertools import product
from pathlib import Path

import pytest
from bench_runs import refusal
from run_folders import Page, write_alerts, write_comparison, write_metrics, write_run

from nanogpt_bench.report import report, report_facts, write_report
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run, load_run


def test_it_is_one_file_that_has_every_chart_and_loads_nothing_from_elsewhere(
    tmp_path,
):
    write_comparison(tmp_path / "runs")
    built = report([tmp_path / "runs"], out=tmp_path / "out")
    names = sorted(
        path.relative_to(built.parent).as_posix()
        for path in built.parent.rglob("*")
        if path.is_file()
    )
    assert names == [
        "figures/loss_curves.svg",
        "figures/stall.svg",
        "report.html",
        "results.csv",
        "table.md",
    ]
    page = Page(built.read_text(encoding="utf-8"))
    for tag, attributes in page.elements:
        assert tag not in {"img", "link", "iframe", "object"}, tag
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "#").startswith("#"), tag
    policy = next(
        a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "http" not in policy
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == [
        "what",
        "results",
        "loss",
        "failures",
        "settings",
        "stall",
        "gradients",
        "configs",
    ]
    charts = {chart["name"] for chart in page.charts()}
    assert charts >= {"val-step", "val-seconds", "train-step", "train-seconds", "stall"}
    assert {f"chart-{name}" for name in charts} <= {
        attributes.get("id") for _, attributes in page.elements
    }
    assert "+0.450 (+21.4%)" in page.text["td"]


def test_a_run_without_an_end_and_a_row_without_runs_say_so(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").unlink()
    rows = [
        Row("bf16-mixed", "bf16-mixed", "none", (load_run(folder),)),
        Row("fp32", "fp32", "none", ()),
    ]
    text = write_report(rows, tmp_path / "out", title="t", facts={}).read_text(encoding="utf-8")
    assert {"unfinished at step 200", "not run"} <= set(Page(text).text["td"])


def test_another_baseline_is_chosen_by_its_row_and_a_wrong_one_or_a_file_as_folder_is_refused(
    tmp_path,
):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", rule="fp32", final=2.0)]
    with refusal(r"config\.yaml"):
        report(paths, out=write_run(tmp_path / "c") / "config.yaml")
    with refusal(r"'fp23'; did you mean 'fp32'\? allowed: bf16-mixed, fp32"):
        report(paths, out=tmp_path / "out", baseline="fp23")
    assert not (tmp_path / "out").exists()
    page = Page(report(paths, out=tmp_path / "out", baseline="fp32").read_text(encoding="utf-8"))
    assert "+0.100 (+5.0%)" in page.text["td"]


def test_every_alert_is_listed_once_a_kind(tmp_path):
    folder = write_run(tmp_path / "a")
    write_alerts(folder, ("kurtosis", 7), ("overflow", 8), ("kurtosis", 9))
    cells = Page(report([folder], out=tmp_path / "out").read_text(encoding="utf-8")).text["td"]
    assert [cells[cells.index(kind) :][1:5] for kind in ("kurtosis", "overflow")] == [
        ["WARN", "7", "2", "kurtosis rose"],
        ["WARN", "8", "1", "overflow rose"],
    ]


@pytest.mark.slow
def test_fifty_runs_of_two_thousand_steps_are_small_and_quick(tmp_path):
    modules = product(range(4), ("qkv", "proj", "fc", "out"))
    layers = [f"blocks.{block}.{name}" for block, name in modules]
    metrics = product(("quant/overflow", "bits/uniformity", "grad/l2"), layers)
    keys = [f"{metric}/{layer}" for metric, layer in metrics]
    watched = [
        "grad/cosine",
        "grad/snr",
        "stall/update_ulps",
        "attention/entropy",
        "quant/kurtosis/residual",
    ]
    for i in range(50):
        folder = write_run(
            tmp_path / "runs" / str(i), rule="nearest", fmt="E4M3", steps=2000, lr=1e-4 * (i + 1)
        )
        write_metrics(
            folder,
            {key: lambda step, i=i: 1 / (step + i + 1) for key in [*keys, *watched]},
            interval=100,
        )
    start = time.process_time()
    built = report([tmp_path / "runs"], out=tmp_path / "out")
    assert time.process_time() - start < 30
    assert built.stat().st_size < 8e6


def test_a_source_of_many_files_is_named_shortly():
    files = {"a.parquet": "715e920aa9985689", "b.parquet": "22576ea2c159107b"}
    corpus = {
        "source": {"kind": "copy", "files": files, "limit": None},
        "splits": {"train": {"tokens": 1200}},
    }
    sentence = report_facts([Run(Path("a"), environment={"corpus": corpus})])["Corpus"]
    assert (
        sentence
        == "kind: copy, files: a.parquet (715e920a…) b.parquet (22576ea2…); train 1,200 tokens"
    )
