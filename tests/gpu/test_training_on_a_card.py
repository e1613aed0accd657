"""Models and optimizers on a card beside the same on the CPU.

They are skipped where there is none.
"""

import copy
from functools import partial

import pytest
import torch
from optimizer_cases import frozen, normal, take_steps
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import _backends, _plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CARD = torch.device("cuda")


def parameters(device):
    """Return codes with scales of rows, blocks and one in all.

    Also values on a grid, and ordinary floats.
    """
    params = [
        fm.FP8Parameter(normal(24, 256, seed=1) * 0.1, "E4M3", seed=1),
        fm.FP8Parameter(
            normal(6, 64, seed=2) * 0.1, "E2M5", granularity="block", seed=2, draws="dither"
        ),
        fm.FP8Parameter(normal(300, seed=3) * 0.1, "E5M2", granularity="tensor", seed=3),
        nn.Parameter(normal(5, 77, seed=4)),
    ]
    return [nn.Parameter(p.detach().to(device)) for p in params]


KINDS = {
    "AdamW": partial(optim.StiffnessAdamW, lr=1e-2, weight_decay=0.1),
    "AdamW residual8": partial(
        optim.StiffnessAdamW, lr=1e-2, moments="8bit", writeback="residual8"
    ),
    "AdamW eager": partial(optim.StiffnessAdamW, lr=1e-2, moments="8bit"),
    "SGD": partial(optim.StiffnessSGD, lr=1e-2, momentum=0.9, writeback="stochastic"),
    "Lion": partial(optim.StiffnessLion, lr=1e-3, moments="8bit", writeback="stochastic"),
    "Adafactor": partial(optim.StiffnessAdafactor, lr=5e-2, weight_decay=0.1),
    "Adafactor residual8": partial(
        optim.StiffnessAdafactor, lr=5e-2, momentum=0.9, moments="8bit", writeback="residual8"
    ),
    "RiemannianAdam": partial(optim.RiemannianAdam, lr=1.0, float_lr=1e-3),
    "RiemannianSGD": partial(optim.RiemannianSGD, lr=1.0, float_lr=1e-3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_the_bits_of_one_on_the_cpu(kind, monkeypatch):
    if "eager" in kind:  # as where there are no kernels
        monkeypatch.setattr(_plan, "on_gpu", lambda device: False)
        monkeypatch.setattr(_backends, "is_triton", lambda slot: False)
    on_cpu, on_card = parameters(torch.device("cpu")), parameters(CARD)
    optimizers = [KINDS[kind](parameters_there) for parameters_there in (on_cpu, on_card)]
    take_steps(optimizers, (on_cpu, on_card), range(4))
    exact = (
        on_cpu[:3] if kind == "RiemannianAdam" else on_cpu
    )  # floats go by torch's operators, which contract there
    for i, (p, q) in enumerate(zip(exact, on_card, strict=False)):
        assert frozen(p) == frozen(q), f"parameter {i}"
        assert frozen(optimizers[0].state[p]) == frozen(optimizers[1].state[q]), i
    torch.testing.assert_close(on_card[3].cpu(), on_cpu[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_muon_goes_the_way_of_the_cpus(moments):
    """Products of other precision leave the CPU's weights within a spacing.

    On average they are closer.
    """
    on_cpu, on_card = (
        [fm.FP8Parameter(normal(64, 128, seed=1) * 0.1, "E2M5", seed=1)] for _ in range(2)
    )
    on_card = [nn.Parameter(p.detach().to(CARD)) for p in on_card]
    for weights in (on_cpu, on_card):
        take_steps([optim.StiffnessMuon(weights, lr=0.02, moments=moments)], [weights], range(3))
    start = fm.FP8Parameter(normal(64, 128, seed=1) * 0.1, "E2M5", seed=1).dequantize()
    cpu_move, card_move = on_cpu[0].dequantize() - start, on_card[0].dequantize().cpu() - start
    assert float(nn.functional.cosine_similarity(cpu_move.flatten(), card_move.flatten(), 0)) > 0.95
    assert 0.9 < float(cpu_move.norm() / card_move.norm()) < 1.1


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 32)
    )
    return fm.quantize_model(net, "E4M3", storage="codes", seed=1)


def losses(model, optimizer, steps):
    values = []
    device = next(model.parameters()).device
    for step in range(steps):
        x = normal(128, 64, seed=step).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x[:, :32])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach())
    return [float(x) for x in values]


@pytest.mark.parametrize("compiled", [False, "default", "reduce-overhead"])
def test_a_model_learns(compiled):
    model = network().to(CARD)
    forward = torch.compile(model, mode=compiled) if compiled else model
    history = losses(forward, optim.StiffnessAdamW(model.parameters(), 3e-3, moments="8bit"), 60)
    assert sum(history[-5:]) < 0.6 * sum(history[:5])


@pytest.mark.parametrize(("first_device", "second_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_from_its_state_dict_on_the_other_device(first_device, second_device):
    model = network().to(first_device)
    optimizer = optim.StiffnessAdamW(
        model.parameters(), 3e-3, moments="8bit", writeback="residual8"
    )
    losses(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = network().to(second_device)
    again.load_state_dict(saved[0])
    resumed = optim.StiffnessAdamW(again.parameters(), 3e-3, moments="8bit", writeback="residual8")
    resumed.load_state_dict(saved[1])
    for step in range(3):  # one at a gradient that is not finite
        for index, (p, q) in enumerate(zip(model.parameters(), again.parameters(), strict=True)):
            assert frozen(p) == frozen(q), (step, index)
            gradient = normal(*p.shape, seed=7 + step) * (torch.nan if step == 1 else 1.0)
            p.grad, q.grad = gradient.to(first_device), gradient.to(second_device)
        optimizer.step()
        resumed.step()
    for index, (p, q) in enumerate(zip(model.parameters(), again.parameters(), strict=True)):
        assert frozen(p) == frozen(q), index
        assert resumed.state[q]["step"].device.type == second_device, index
    assert frozen(optimizer.state_dict()["state"]) == frozen(resumed.state_dict()["state"])


def test_training_makes_no_wait():
    model = network().to(CARD)
    optimizer = optim.StiffnessAdamW(model.parameters(), 3e-3, moments="8bit")
    x = normal(128, 64, seed=1).to(CARD)

    def train():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    try:
        torch.cuda.set_sync_debug_mode("error")
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_steps_in_backward_leave_the_bits_of_a_step():
    outcomes = []
    for way in ("step", "in backward"):
        model = network().to(CARD)
        make = partial(optim.StiffnessAdamW, lr=3e-3, moments="8bit", writeback="stochastic")
        optimizer = make(model.parameters())
        handle = optim.step_in_backward(optimizer) if way == "in backward" else None
        for step in range(4):
            loss = model(normal(128, 64, seed=step).to(CARD)).square().mean()
            loss.backward()
            if way != "in backward":
                optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            handle.remove()
        torch.cuda.synchronize()
        outcomes.append([frozen(p) for p in model.parameters()])
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1", "E2M5", "E7M0"])
def test_tensors_round_print_and_travel(fmt):
    on_cpu = fm.FP8Parameter(normal(8, 64, seed=1), fmt, seed=1)
    on_card = nn.Parameter(on_cpu.detach().to(CARD))
    assert frozen(on_card) == frozen(on_cpu)
    assert frozen(on_card.cpu()) == frozen(on_cpu.detach())
    assert torch.equal(on_card.dequantize().cpu(), on_cpu.dequantize())
    assert fmt in repr(on_card)
    with torch.no_grad():
        for p in (on_cpu, on_card):
            p.copy_(normal(8, 64, seed=2).to(p.device))
            p.mul_(1.1)
    assert frozen(on_card) == frozen(on_cpu)


@pytest.mark.parametrize(
    ("kind", "lr", "options"),
    [
        (optim.StiffnessAdamW, 1e-2, {"moments": "8bit"}),
        (optim.StiffnessAdafactor, 5e-2, {}),
    ],
    ids=["AdamW", "Adafactor"],
)
def test_a_graphed_training_step_has_the_bits_of_calls(kind, lr, options):
    """A small model, under a schedule, over a refresh of S_ref."""
    outcomes = []
    for graphed in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(CARD)
        model = fm.quantize_model(model, "E4M3", storage="codes")
        optimizer = kind(model.parameters(), lr, refresh_every=8, **options)

        def train_step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = optim.graphed(train_step, optimizer) if graphed else train_step
        losses = []
        for i in range(20):
            optimizer.param_groups[0]["lr"] = lr / (1 + i % 3)
            losses.append(float(step(normal(32, 64, seed=i).to(CARD))))
        outcomes.append(
            (losses, frozen(list(model.parameters())), frozen(optimizer.state_dict()["state"]))
        )
        assert not graphed or (step.recorded == 1 and step.replayed == 17), graphed
    assert outcomes[0] == outcomes[1]
