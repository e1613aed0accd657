"""A check of an installed wheel, `python tests/smoke.py [--native]`.

It needs torch, geoopt and numpy alone.

A layer on one byte a weight is trained, saved, read back and stepped again; rounding is
that of the definition.
"""

import io
import sys
import warnings

warnings.filterwarnings("ignore", message="`torch.jit.script`")

import torch  # noqa: E402

import fp8manifold as fm  # noqa: E402


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, list[float]]:
    """Thirty steps of least squares on weights of one byte."""
    torch.manual_seed(0)
    model = fm.quantize_model(torch.nn.Linear(16, 8), "E4M3", storage="codes")
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=2e-2, moments="8bit")
    return model, optimizer, [step(model, optimizer) for _ in range(30)]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-1, 1, 64).reshape(4, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(native: bool) -> None:
    """Train, save, read and go on, and compare rounding with its definition.

    With `native`, missing C code is an error.
    """
    if native:
        warnings.filterwarnings("error", message="fp8manifold's native code")
    model, optimizer, losses = trained()
    assert losses[-1] < losses[0] / 2, losses
    again, again_optimizer, _ = trained()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    step(again, again_optimizer)  # elsewhere than what is read
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    assert [step(model, optimizer) for _ in range(5)] == [
        step(again, again_optimizer) for _ in range(5)
    ]
    values = torch.linspace(-3, 3, 301)
    defined = [float(fm.reference.round_to_grid(value, "E4M3")) for value in values.tolist()]
    assert fm.round_to_grid(values, "E4M3").tolist() == defined
    print(f"{fm.__file__}, torch {torch.__version__}: passed")


if __name__ == "__main__":
    main("--native" in sys.argv[1:])
