"""Sampling by the cache and by whole passes gives the same tokens.

The draws, and the command over a run's weights.
"""

import json
import math

import pytest
import torch
from bench_runs import refusal

from nanogpt_bench.cli import main
from nanogpt_bench.commands.sample import Draw, sample_run
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import GPT, GPTShape, KeyValueCache, build_model, sample

SMALL = GPTShape(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50)


@pytest.fixture(scope="module")
def model():
    model = build_model(SMALL, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from a uniform guess
    return model


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def tokens(batch, time):
    return torch.randint(0, 50, (batch, time), generator=generator(time))


def test_a_cache_gives_the_logits_of_a_whole_pass(model):
    text, cache = tokens(3, 8), KeyValueCache(2)
    model.eval()
    parts = [model(part, cache) for part in text.split((3, 1, 1, 1, 1, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(text), rtol=1e-5, atol=1e-5)
    assert cache.length == 8


@pytest.mark.parametrize("prompt", [1, 5, 8, 13])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 3}, {"top_k": 99}]
)
def test_tokens_are_those_of_whole_passes_within_the_window_and_beyond(model, prompt, options):
    """By definition every token is from a pass over the last `block_size` before it."""
    text, drawn = tokens(2, prompt), generator()
    sampled = torch.stack(list(model.generate(text, 12, generator=generator(), **options)), 1)
    model.eval()
    for _ in range(12):
        logits = model(text[:, -SMALL.block_size :])[:, -1]
        text = torch.cat([text, sample(logits.detach(), generator=drawn, **options)[:, None]], 1)
    assert torch.equal(sampled, text[:, prompt:])


def test_draws_follow_the_softmax_of_the_k_likeliest():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(20_000, 4)
    shares = (
        torch.bincount(sample(logits, temperature=0.5, top_k=2, generator=generator()), minlength=4)
        / 20_000
    )
    expected = 1 / (1 + math.exp(-1 / 0.5))
    assert shares[:2].tolist() == [0, 0]
    assert float(shares[3]) == pytest.approx(
        expected, abs=4 * math.sqrt(expected * (1 - expected) / 20_000)
    )
    assert sample(logits[:2], top_k=1).tolist() == [3, 3]
    assert sample(logits[:2] * 1e30, temperature=1e-30).tolist() == [3, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_drawn_of_logits_that_are_not_finite(bad):
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(torch.tensor([[0.0, bad]]))


def test_a_run_writes_text_in_each_format_of_the_same_draws(trained, tmp_path):
    out = tmp_path / "texts" / "a.json"
    options = [
        "--prompt",
        "def ",
        "--tokens",
        "20",
        "--seed",
        "5",
        "--top-k",
        "9",
        "--temperature",
        "0.9",
    ]
    assert (
        main(
            ["sample", str(trained["float"]), "--formats", "e4m3,none", *options, "--out", str(out)]
        )
        == 0
    )
    rows = json.loads(out.read_text())
    assert [row["format"] for row in rows] == ["none (as trained)", "E4M3", "none"]
    assert rows[0]["text"] == rows[2]["text"] != ""
    assert rows[0]["draw"] == {
        "prompt": "def ",
        "tokens": 20,
        "temperature": 0.9,
        "top_k": 9,
        "seed": 5,
    }
    assert all(row["tokens"] <= 20 for row in rows)
    for seed in (5, 6):
        text = sample_run(trained["float"], Draw("def ", 20, 0.9, 9, seed))[0].text
        assert (text == rows[0]["text"]) is (seed == 5), seed


@pytest.mark.parametrize("kind", ["one byte", "master copy", "bfloat16", "tied", "untied"])
def test_weights_of_every_kind_write(trained, kind, capsys):
    assert (
        main(
            [
                "sample",
                str(trained[kind]),
                "--checkpoint",
                "step-3",
                "--tokens",
                "9",
                "--temperature",
                "0",
            ]
        )
        == 0
    )
    assert "(as trained), " in capsys.readouterr().out


def test_an_end_of_text_ends_the_text_and_nan_is_refused(tiny, text_file, tmp_path, monkeypatch):
    prepare_text(text_file, tmp_path / "corpus", "byte")
    run(
        tiny(train__max_steps=2, checkpoint__every=2, data__dir=tmp_path / "corpus"),
        tmp_path / "run",
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            GPT, "generate", lambda *_, **__: iter(torch.tensor([[104], [105], [256], [33]]))
        )
        (row,) = sample_run(tmp_path / "run", Draw())
    assert (row.text, row.tokens) == ("hi", 2)
    monkeypatch.setattr(GPT, "forward", lambda *_: torch.full((1, 1, 257), math.nan))
    with refusal(r"^none \(as trained\): the logits are not finite"):
        sample_run(tmp_path / "run", Draw())
