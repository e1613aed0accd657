"""Every option of an optimizer stands in its signature, also those that all of them share and that are spelt once."""

import inspect
import re

import pytest
import torch

from fp8manifold import optim

REST = "refresh_every=100, maximize=False, on_nonfinite='skip', stabilize_every=None, reset_every=None, **flags"
BOUNDS = f"damping=0.00390625, clip=16.0, {REST}"
ROUNDED = f"writeback='stochastic', draws='independent', moments='float32', seed=0, {BOUNDS}"
CHARTED = f"float_lr=None, writeback=None, draws=None, moments='float32', seed=0, {BOUNDS}"
SIGNATURES = {
    "StiffnessAdamW": "lr=0.001, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.0, *, stiffness=0.0, metric='ulp', "
    + ROUNDED,
    "StiffnessSGD": "lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, *, stiffness=0.0, "
    "metric='ulp', " + ROUNDED,
    "StiffnessLion": "lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, *, stiffness=0.0, metric='ulp', " + ROUNDED,
    "StiffnessMuon": "lr=0.001, weight_decay=0.1, momentum=0.95, nesterov=True, "
    "ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-07, ns_steps=5, adjust_lr_fn=None, *, direction='muon', "
    "matrix_shape='auto', ns_dtype=None, betas=(0.9, 0.95), adam_eps=1e-08, stiffness=0.0, metric='ulp', " + ROUNDED,
    "Madam": "lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, float_lr=0.001, max_direction=10.0, "
    "escape=0.0625, " + ROUNDED,
    "RiemannianAdam": "lr=None, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False, *, stabilize=None, "
    + CHARTED,
    "RiemannianSGD": "lr=None, momentum=0, dampening=0, weight_decay=0, nesterov=False, stabilize=None, *, " + CHARTED,
    "FisherNaturalGradient": "model, loader, lr=0.001, momentum=0.9, betas=(0.9, 0.95), eps=1e-08, "
    "weight_decay=0.0, *, representation='kfac', refresh=10, damping=1.0, decay=0.9, batches=1, samples=1, "
    "normalize=True, max_features=4096, logits=call_model, floor=0.00390625, stiffness=0.0, metric='ulp', "
    f"writeback='stochastic', draws='independent', moments='float32', seed=0, clip=16.0, {REST}",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_has_every_option(name: str) -> None:
    signature = inspect.signature(getattr(optim, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert re.sub(r"<function (\w+) at \w+>", r"\1", shown) == f"(params, {SIGNATURES[name]})"
    assert inspect.Parameter.empty not in {p.annotation for p in signature.parameters.values()}
    assert str(signature.parameters["writeback"].annotation) in ("<class 'str'>", "str | None")


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name != "FisherNaturalGradient"])
def test_groups_have_what_the_signature_has(name: str) -> None:
    optimizer = getattr(optim, name)([torch.nn.Parameter(torch.eye(3))])
    options = inspect.signature(type(optimizer)).parameters.keys() - {"params", "flags", "stabilize"}
    assert optimizer.defaults.keys() == options


def test_a_subclass_may_have_options_of_its_own() -> None:
    class Mine(optim.StiffnessLion):
        def __init__(self, params: object, speed: float = 2.0) -> None:
            super().__init__(params, 1e-3 * speed, writeback="nearest")  # type: ignore[arg-type]

    (group,) = Mine([torch.nn.Parameter(torch.ones(3))]).param_groups
    assert (group["lr"], group["writeback"], group["moments"]) == (2e-3, "nearest", "float32")
