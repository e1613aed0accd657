"""FisherNaturalGradient: resuming and learning in every format."""

import sys
import warnings
from typing import Any

import pytest
import torch
from fisher_cases import EVERY, STORAGES, batch, optimizer_of, put_gradients, tagger, train, values
from optimizer_cases import frozen, same_bits, through_disk

from fp8manifold.optim import FisherNaturalGradient

pytest.importorskip("nngeometry", reason="extra fisher")


# Resuming


def resumes(storage: str, steps: int, **options: Any) -> None:
    """After every step a checkpoint, loaded elsewhere, takes the next step as the run itself does."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(9)), 3, shuffle=True)
    model, other = tagger(storage), tagger(storage, seed=1)
    optimizer = optimizer_of(model, loader, **options)
    train(model, optimizer, 1)
    for step in range(1, steps):
        saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other.load_state_dict(saved["model"])
        again = optimizer_of(other, loader, **options)
        again.load_state_dict(saved["optimizer"])
        train(model, optimizer, 1, step)
        train(other, again, 1, step)
        assert same_bits(values(model.parameters()), values(other.parameters())), f"after step {step}"
        assert frozen(optimizer.state_dict()) == frozen(again.state_dict()), f"after step {step}"


@EVERY
@pytest.mark.parametrize("storage", STORAGES)
def test_resume_is_bit_exact_for_every_representation(representation: str, storage: str) -> None:
    resumes(storage, 15, representation=representation, refresh=4, weight_decay=0.1)


# Learning


@EVERY
@pytest.mark.parametrize("storage", STORAGES)
def test_learns(representation: str, storage: str) -> None:
    model = tagger(storage)
    optimizer = optimizer_of(model, lr=0.03, representation=representation)
    first = put_gradients(model)
    train(model, optimizer, 80)
    assert first > 1.4
    assert put_gradients(model) < 0.35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_learns_in_other_dtypes(dtype: torch.dtype) -> None:
    model = tagger("plain").to(dtype)
    optimizer = optimizer_of(model, lr=0.02)
    first = put_gradients(model)
    train(model, optimizer, 40)
    assert put_gradients(model) < 0.7 * first
    metric = optimizer.state[model.head.weight]
    assert {metric[name].dtype for name in ("inverse_inputs", "fisher_outputs")} == {torch.float32}
    assert metric["momentum_buffer"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


# Where it measures


def test_bad_sources() -> None:
    model = tagger()
    optimizer = FisherNaturalGradient(model.parameters(), model, lambda step: [])
    put_gradients(model)
    with pytest.raises(ValueError, match="gave no batch"):
        optimizer.step()
    optimizer.loader = [{"ids": batch()[0]}]
    with pytest.raises(TypeError, match="the loader gave a dict, not tensors: say with logits="):
        optimizer.step()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8manifold\[fisher\]'"):
        optimizer_of(tagger())


def test_logits_may_be_computed_in_another_way() -> None:
    model = tagger()
    optimizer = optimizer_of(model, [{"ids": batch()[0]}], logits=lambda m, b: m(b["ids"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    assert optimizer.skipped_steps == 0
