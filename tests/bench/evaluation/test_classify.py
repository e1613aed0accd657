"""Documents and their labels.

The head, the figures, runs of every kind, and what a classifier can't be asked for.
"""

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_runs import flags, recorded, refusal, summary_of, train, trainer_of
from damages import put, signed
from torch.nn import functional

from nanogpt_bench.cli import main
from nanogpt_bench.data.batches import documents_of, draw_documents, open_corpus
from nanogpt_bench.evaluation.weights import evaluate_run
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import PADDING, Classifier, GPTShape, build_model
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import find_reference, group_rows, loss_unit
from nanogpt_bench.report.tables import to_csv, to_markdown
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.task import document_losses, f1_scores, r_precision

SMALL = GPTShape(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50, labels=5)
FIGURES = ("val/micro_f1", "val/macro_f1", "val/r_precision")


@pytest.fixture
def classify(tiny, labelled_dir):
    """The settings of a classifier that takes a second."""
    return lambda **overrides: tiny(**{"task": "classify", "data__dir": labelled_dir, **overrides})


@pytest.mark.extra("sklearn")
@pytest.mark.parametrize("seed", range(5))
def test_figures_are_scikit_learns(seed):
    from sklearn import metrics as judge

    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randint(-4, 5, (40, 9), generator=generator).float() / 2 - 0.25
    )  # some of them alike
    true_labels = (torch.rand((40, 9), generator=generator) < 0.3).float()
    true_labels[:, 2], true_labels[3], logits[:, 2] = (
        0,
        0,
        -1,
    )  # one label nobody has, one document has none
    micro, macro = f1_scores(logits, true_labels)
    predicted, true = (logits > 0).numpy(), true_labels.numpy()
    assert micro == pytest.approx(
        judge.f1_score(true, predicted, average="micro", zero_division=0), abs=1e-12
    )
    assert macro == pytest.approx(
        judge.f1_score(true, predicted, average="macro", zero_division=0), abs=1e-12
    )
    top = np.zeros_like(true)
    for row, scores, labels in zip(top, logits.numpy(), true, strict=True):
        row[np.argsort(-scores, kind="stable")[: int(labels.sum())]] = 1
    known = true.sum(1) > 0
    expected = judge.precision_score(true[known], top[known], average="samples", zero_division=0)
    assert r_precision(logits, true_labels) == pytest.approx(expected, abs=1e-12)
    logits_of_none, no_labels = torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2)
    assert r_precision(logits_of_none, no_labels) is None
    assert (
        f1_scores(logits_of_none, no_labels)[0]
        == f1_scores(-torch.ones(2, 3), torch.zeros(2, 3))[1]
        == 0.0
    )
    losses = [
        judge.log_loss(row, p, labels=[0, 1])
        for row, p in zip(true, logits.double().sigmoid(), strict=True)
    ]
    assert document_losses(logits, true_labels).tolist() == pytest.approx(losses, abs=1e-6)


def test_a_head_sees_a_document_whatever_stands_behind_it():
    model = build_model(SMALL, seed=0)
    assert isinstance(model, Classifier)
    document = torch.tensor([[3, 1, 4]])
    padded = torch.tensor([[3, 1, 4, PADDING, PADDING], [2, 7, 1, 8, 2]])
    hidden = model.hidden(document)[0]
    expected = model.lm_head(hidden.mean(0))
    for logits in (model(document)[0], model(padded)[0]):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    model(padded)[0].sum().backward()
    touched = model.token_embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [1, 3, 4]


def test_the_loss_is_the_mean_over_documents_and_labels():
    model = build_model(SMALL, seed=0)
    tokens, labels = (
        torch.tensor([[3, 1, 4], [1, 5, PADDING]]),
        torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]),
    )
    p = model(tokens).double().sigmoid()
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    assert model.loss(tokens, labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert document_losses(model(tokens), labels).mean().item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_a_run_learns_what_its_documents_say(classify, tmp_path):
    settings = {
        "train__max_steps": 150,
        "eval__interval": 50,
        "optimizer__lr": 1e-2,
        "train__batch_size": 16,
    }
    config = classify(
        **settings, model__block_size=64, model__n_embd=32, eval__batches=4, rule="fp32"
    )
    summary = run(config, tmp_path / "r")
    validations = [record for record in recorded(tmp_path / "r") if "val/loss" in record]
    assert [record["step"] for record in validations] == [0, 50, 100, 150]
    assert [set(FIGURES) <= set(record) for record in recorded(tmp_path / "r")].count(True) == 4
    for record in validations:
        assert not {"val/perplexity", "val/bits_per_byte"} & record.keys()
    assert {summary[key.partition("/")[2]] for key in FIGURES} == {
        validations[-1][key] for key in FIGURES
    }
    assert summary["r_precision"] > 0.7 > validations[0]["val/r_precision"] + 0.2
    assert summary["micro_f1"] > 0.6
    assert summary["bits_per_byte"] is None


def test_a_validation_is_the_mean_over_different_documents(classify):
    trainer = trainer_of(classify(eval__batches=50, train__batch_size=7))
    assert len(trainer.validation_losses()) == 60
    val = documents_of(trainer.corpus, "val")
    tokens, labels = val.rows(np.arange(60), 16)
    with trainer.precision():
        whole = functional.binary_cross_entropy_with_logits(trainer.model(tokens).float(), labels)
    assert trainer.validate() == pytest.approx(whole.item(), rel=1e-3)
    assert trainer.task.bits_per_byte(1.0) is None


def test_tokens_are_counted_without_padding(classify, tmp_path):
    config = classify(model__block_size=64, train__accumulation=2, rule="fp32")
    summary = run(config, tmp_path / "r")
    corpus = open_corpus(resolve(config))
    train = documents_of(corpus, "train")
    draws = [
        draw_documents(train, 4, seed=42, step=step, micro_step=micro)
        for step, micro in product(range(6), range(2))
    ]
    assert summary["tokens"] == sum(
        int((train.ends - train.starts)[documents].sum()) for documents in draws
    )


@pytest.mark.parametrize(
    ("formats", "quantised"),
    [("{'*': E4M3}", True), ("{'*': E4M3, lm_head: none}", False), ("{lm_head: E4M3}", True)],
)
def test_the_head_follows_its_pattern(formats, quantised, classify):
    trainer = trainer_of(classify(rule="stochastic", model__formats=formats))
    assert ("lm_head" in quantized_layers(trainer.model)) is quantised
    assert trainer.model.lm_head.weight.shape == (8, 16)


@pytest.fixture(scope="module")
def classified(tiny, labelled_dir, tmp_path_factory):
    """A run in E4M3 of six steps."""
    folder = tmp_path_factory.mktemp("classified") / "r"
    run(
        tiny(task="classify", data__dir=labelled_dir, rule="stochastic", model__format="E4M3"),
        folder,
    )
    return folder


def test_evaluate_measures_its_weights(classified, capsys, tmp_path):
    rows = evaluate_run(classified, formats=["E7M0", "none"])
    assert "recorded the same val loss as the first row, to the bit" in capsys.readouterr().err
    summary = summary_of(classified)
    assert [row.format for row in rows] == ["E4M3 (as trained)", "none", "E7M0"]
    assert rows[0].val_loss == summary["final_val_loss"]
    assert rows[0].of_labels == {
        key: summary[key] for key in ("micro_f1", "macro_f1", "r_precision")
    }
    assert rows[0].perplexity is rows[0].bits_per_byte is None
    assert rows[2].val_loss != rows[0].val_loss
    assert main(["evaluate", str(classified), "--out", str(tmp_path / "rows.json")]) == 0
    assert "R-precision" in capsys.readouterr().out
    exported = json.loads((tmp_path / "rows.json").read_text())
    assert exported[0]["r_precision"] == summary["r_precision"]


@pytest.mark.parametrize("task", ["language", "classify"])
def test_no_run_starts_from_a_classifier(task, classified, classify):
    message = (
        r"model\.init_from: .* was trained with task 'classify'; give a run with task 'language'"
    )
    with refusal(message):
        resolve(classify(task=task, model__init_from=classified))


def test_what_a_classifier_or_a_text_without_labels_is_not_for_is_refused(
    classified, classify, corpus_dir, tmp_path, refused
):
    with pytest.raises(TypeError, match="a classifier can't write text"):
        next(build_model(SMALL, seed=0).generate(torch.tensor([[1]]), 1))
    assert (
        "was trained with task 'classify', so its weights can't write text; to measure them: nanogpt-bench"
        in refused("sample", classified)
    )
    message = refused("evaluate", classified, "--formats", "all")
    assert (
        "was trained with task 'classify', but a report of formats needs windows of a text;"
        in message
    )
    with refusal(r"'classify' needs documents with labels.*prepare eurlex --task labels"):
        run(classify(data__dir=corpus_dir), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_classifier_starts_from_a_language_model(classify, tiny, labelled_dir, tmp_path, tied):
    run(tiny(data__dir=labelled_dir, model__tie_weights=tied), tmp_path / "before")
    settings = classify(model__init_from=tmp_path / "before", rule="fp32")
    language = trainer_of(tiny(data__dir=labelled_dir, model__init_from=tmp_path / "before"))
    started, fresh = trainer_of(settings), trainer_of(classify(rule="fp32"))
    language_state = language.model.state_dict()
    for name, value in started.model.state_dict().items():
        assert name == "lm_head.weight" or torch.equal(value, language_state[name]), name
    assert torch.equal(started.model.lm_head.weight, fresh.model.lm_head.weight)
    assert run(settings, tmp_path / "after")["status"] == "finished"


def test_other_labels_are_another_corpus(classified, classify, labelled_dir, tmp_path):
    shutil.copytree(classified, tmp_path / "r")
    other_labels, renamed = (
        Path(shutil.copytree(labelled_dir, tmp_path / name)) for name in ("flipped", "renamed")
    )
    for path in other_labels.glob("*.labels.bin"):
        signed((1 - np.fromfile(path, np.uint8)).tobytes())(path)
    settings = {"rule": "stochastic", "model__format": "E4M3", "data__dir": other_labels}
    with refusal("the run began on another corpus"):
        run(classify(**settings), tmp_path / "r", resume=True)
    put("labels", json.loads((renamed / "meta.json").read_text())["labels"][::-1])(
        renamed / "meta.json"
    )
    with refusal("was trained on other labels than"):
        evaluate_run(classified, overrides=["--data.dir", str(renamed)])
    (row,) = evaluate_run(classified, overrides=["--data.dir", str(other_labels)])[:1]
    assert row.val_loss > 0.7


def test_the_table_has_the_figures_and_the_unit(classified, classify, tiny, labelled_dir, tmp_path):
    run(classify(), tmp_path / "base")
    summary = run(tiny(data__dir=labelled_dir), tmp_path / "language")
    assert not {"micro_f1", "macro_f1", "r_precision"} & summary.keys()
    for record in recorded(tmp_path / "language"):
        assert not set(FIGURES) & record.keys()
    loaded = [load_run(path) for path in (tmp_path / "base", classified)]
    rows = group_rows(loaded)
    results = measure(rows, find_reference(rows))
    alone = group_rows(
        loaded[1:]
    )  # beside a row of the same figures they would not tell rows apart
    heading = to_markdown(measure(alone, None)).splitlines()[0]
    assert [name for name in ("Micro F1", "Macro F1", "R-precision") if name not in heading] == []
    assert to_csv(results).splitlines()[0].endswith("verdict,micro_f1,macro_f1,r_precision")
    assert results[1].other_metrics["r_precision"].mean == loaded[1].number("r_precision")
    language = group_rows([load_run(tmp_path / "language")])
    assert "F1" not in to_markdown(measure(language, None))
    assert (loss_unit(rows), loss_unit(language)) == ("nats per label", "nats per token")
    assert loss_unit([*rows, *language]) == "nats"
    mixed = group_rows([*loaded, load_run(tmp_path / "language")])
    verdicts = [
        result.verdict.text for result in measure(mixed, find_reference(mixed, mixed[0].label))
    ]
    assert "task" in verdicts[2]


@pytest.mark.usefixtures("_forked_workers")
def test_compare_takes_the_task(labelled_dir, tmp_path):
    small = {
        "model.n_layer": 1,
        "model.n_head": 2,
        "model.n_embd": 16,
        "model.block_size": 16,
        "train.batch_size": 4,
    }
    words = [
        "compare",
        "--task",
        "classify",
        "--rules",
        "fp32,stochastic",
        "--max-steps",
        "4",
        "--out",
    ]
    assert main([*words, str(tmp_path / "c"), "--data.dir", str(labelled_dir), *flags(small)]) == 0
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("R-precision", "nats per label", "Macro F1"))


def test_it_is_compiled_to_the_same_loss(classify):
    plain, compiled = (
        train(trainer_of(classify(rule="fp32", runtime__compile=compiles)), 3)
        for compiles in (False, True)
    )
    assert plain == pytest.approx(compiled, rel=1e-4)
