"""The monitors on constructed layers whose figures are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import geoopt
import pytest
import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.model.gpt import GPT, GPTShape
from nanogpt_bench.observers import Observer, Step, UpdateObserver
from nanogpt_bench.observers.attention import AttentionEntropy
from nanogpt_bench.observers.bits import Bits
from nanogpt_bench.observers.capture import Capture
from nanogpt_bench.observers.geometry import Geometry
from nanogpt_bench.observers.gradients import Gradients
from nanogpt_bench.observers.ranges import Ranges
from nanogpt_bench.observers.resources import Resources, flops_per_token
from nanogpt_bench.observers.stall import Zones
from nanogpt_bench.setup.layers import linear_layers
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantized_layers

EVERY = MonitorConfig(interval=1, histogram_interval=1)
Spec = dict[str, object]


def layer_of(spec: Spec, weight: Tensor, storage: str = "master") -> nn.Sequential:
    """A model of one quantised linear layer with this weight."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    model = fm.quantize_model(nn.Sequential(linear), {"*": spec}, storage)
    assert isinstance(model, nn.Sequential)
    return model


def one_step(model: nn.Module, observers: list[Observer], inputs: Tensor, lr: float = 0.0, number: int = 1) -> Step:
    """Forward, backward, SGD and the writing of the record, as the loop does them."""
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if any(isinstance(layer.manifold, fm.FP8Manifold) for layer in quantized_layers(model).values()):
        optimizer = fm.optim.StiffnessSGD(model.parameters(), lr=lr, stiffness=0.0, momentum=0.0, writeback="nearest")
    step = Step(number, model, optimizer)
    points: list[Callable[[Observer], Callable[[Step], None]]] = [
        lambda o: o.before_forward,
        lambda o: o.after_forward,
        lambda o: o.after_backward,
        lambda o: o.before_step,
        lambda o: o.after_step,
        lambda o: o.written,
    ]
    for index, point in enumerate(points):
        if index == 1:
            loss = model(inputs).sum()
        if index == 2:
            loss.backward()
        if index == 4:
            optimizer.step()
        for observer in observers:
            point(observer)(step)
    return step


def ranges_of(model: nn.Module, monitor: MonitorConfig = EVERY) -> list[Observer]:
    capture = Capture(monitor.interval)
    ranges = Ranges(linear_layers(model), capture, monitor)
    layers = quantized_layers(model)
    storage = next(iter(layers.values())).storage if layers else "float32"
    return [capture, UpdateObserver(layers, storage, [ranges]), ranges]


def test_thirty_seven_overflowing_weights_of_64_are_37_in_64() -> None:
    weight = torch.full((8, 8), 0.5)
    weight.view(-1)[:37] = 1000.0
    model = layer_of({"weight": {"format": "E4M3", "scale": 1.0}}, weight)
    record = one_step(model, ranges_of(model), torch.ones(2, 8)).record
    assert record["quant/overflow/weight/0"] == record["quant/overflow/weight"] == 37 / 64
    assert record["quant/clamped/weight/0"] == 37 / 64
    assert record["quant/amax/weight/0"] == 1000.0
    assert record["quant/scale/weight/0"] == 1.0


def test_weights_on_the_grid_are_measured_as_the_step_asked_for_them() -> None:
    model = layer_of({"weight": "E4M3"}, torch.full((4, 4), 0.25), "grid")
    limit = float(model[0].weight_scale().max()) * 448
    inputs = torch.ones(1, 4)
    inputs[0, 0] = -2 * limit  # the gradient of column 0
    record = one_step(model, ranges_of(model), inputs, lr=1.0).record
    assert record["quant/overflow/weight/0"] == 0.25
    assert float(model[0].weight.detach().max()) == limit


def test_activations_and_gradients_are_measured_before_they_are_quantised() -> None:
    spec: Spec = {"activation": {"format": "E4M3", "scale": 1.0}, "gradient": {"activation": "E5M2"}}
    model = layer_of(spec, torch.eye(4))
    inputs = torch.tensor([[1000.0, 1.0, 1e-6, 0.0]])
    record = one_step(model, ranges_of(model), inputs).record
    assert record["quant/overflow/activation/0"] == 0.25
    assert record["quant/underflow/activation/0"] == 0.25
    assert record["quant/amax/gradient/0"] == 1.0
    assert record["quant/scale/gradient/0"] == pytest.approx(1 / 57344)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_gradients_of_weights_are_measured_where_they_are_quantised(granularity: str) -> None:
    fixed = {"scale": 1.0} if granularity == "tensor" else {"granularity": granularity}
    model = layer_of({"gradient": {"weight": {"format": "E5M2", **fixed}}}, torch.ones(2, 32))
    inputs = torch.ones(1, 32)
    inputs[0, :3] = torch.tensor([1e6, 1e-9, 0.0])
    capture = Capture(1)
    observers = [capture, Ranges(linear_layers(model), capture, EVERY), Bits(linear_layers(model), capture, EVERY)]
    record = one_step(model, observers, inputs).record
    assert record["quant/amax/weight_gradient/0"] == 1e6
    assert record["quant/underflow/weight_gradient/0"] == 1 / 32
    assert record["quant/overflow/weight_gradient/0"] == (1 / 32 if granularity == "tensor" else 0.0)
    assert record["bits/codes_used/weight_gradient/0"] == 3 / 248
    assert not capture.weight_gradients
    assert not model[0].weight_gradient_scaler._forward_pre_hooks


def test_what_has_no_format_is_measured_without_one_or_as_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    inputs = torch.tensor([[1.0, 2.0, 3.0, 1e-9]])
    record = one_step(model, ranges_of(model), inputs).record
    assert record["quant/amax/activation/0"] == 3.0
    assert not [key for key in record if key.startswith(("quant/overflow", "quant/scale"))]
    monitor = MonitorConfig(interval=1, activation_format="E4M3")
    record = one_step(model, ranges_of(model, monitor), inputs).record
    assert record["quant/underflow/activation/0"] == 0.25
    assert "quant/underflow/gradient/0" not in record


def test_changes_of_scale_are_counted_from_look_to_look() -> None:
    model = layer_of({"weight": "E4M3", "granularity": "channel"}, torch.ones(4, 4))
    observers = ranges_of(model)
    assert "quant/scale_changes/weight/0" not in one_step(model, observers, torch.ones(1, 4)).record
    with torch.no_grad():
        model[0].weight[0] = 2.0
    record = one_step(model, observers, torch.ones(1, 4), number=2).record
    assert record["quant/scale_changes/weight/0"] == 0.25


def test_a_block_of_activations_has_a_scale_of_its_own() -> None:
    model = layer_of({"activation": {"format": "E4M3", "granularity": "block"}}, torch.ones(2, 64))
    inputs = torch.ones(3, 64)
    inputs[:, 32:] = 2.0**20
    record = one_step(model, ranges_of(model), inputs).record
    assert record["quant/overflow/activation/0"] == record["quant/underflow/activation/0"] == 0.0


def bits_of(model: nn.Module) -> list[Observer]:
    capture = Capture(1)
    return [capture, Bits(linear_layers(model), capture, EVERY)]


def test_a_bit_that_no_weight_sets_reports_zero() -> None:
    weight = torch.tensor([[1.0, 1.5, 448.0, 448.0]])
    model = layer_of({"weight": {"format": "E4M3", "scale": 1.0}}, weight)
    step = one_step(model, bits_of(model), torch.ones(1, 4))
    record = step.record
    assert [record[f"bits/mantissa_bit_{bit}/weight/0"] for bit in range(3)] == [0.0, 0.5, 0.75]
    assert record["bits/entropy/weight/0"] == 1.5
    assert record["bits/top_exponent/weight/0"] == 0.5
    assert record["bits/codes_used/weight/0"] == 3 / 254
    histogram = next(h for h in step.histograms if h["name"] == "bits/code_histogram/weight/0")
    counts = dict(zip(histogram["values"], histogram["counts"], strict=True))
    assert {value: n for value, n in counts.items() if n} == {1.0: 1, 1.5: 1, 448.0: 2}
    assert len(counts) == 253  # both zeros are one value
    gaps = next(h for h in step.histograms if h["name"] == "bits/gap_lengths/weight/0")
    assert (gaps["values"], gaps["counts"]) == ([3.0, 65.0], [1, 1])
    assert record["bits/longest_gap/weight/0"] == 65


def test_codes_ever_used_remember() -> None:
    model = layer_of({"weight": {"format": "E4M3", "scale": 1.0}}, torch.ones(1, 4))
    observers = bits_of(model)
    one_step(model, observers, torch.ones(1, 4))
    model[0].weight.data.fill_(2.0)
    record = one_step(model, observers, torch.ones(1, 4), number=2).record
    assert (record["bits/codes_used/weight/0"], record["bits/codes_ever_used/weight/0"]) == (1 / 254, 2 / 254)


def test_activations_that_are_quantised_have_codes() -> None:
    model = layer_of({"activation": {"format": "E2M1", "scale": 1.0}}, torch.ones(1, 2))
    record = one_step(model, bits_of(model), torch.tensor([[1.0, 6.0]])).record
    assert record["bits/entropy/activation/0"] == 1.0
    assert "bits/entropy/weight/0" not in record


def test_gradient_figures_are_those_of_the_weight_before_clipping() -> None:
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    step = one_step(model, [Gradients(linear_layers(model), EVERY)], torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
    assert step.record["grad/l2/0"] == 5.0
    assert step.record["grad/linf"] == 4.0
    assert step.record["grad/zero/0"] == 0.5
    magnitudes = next(h for h in step.histograms if h["name"] == "grad/magnitude/0")
    assert sum(magnitudes["counts"]) == 4


@pytest.mark.parametrize("small", [0.0, 1e-9])
def test_a_weight_is_dead_after_its_steps_without_a_gradient(small: float) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observer = Gradients(linear_layers(model), MonitorConfig(interval=1, dead_steps=3))
    dead = []
    for number, first in enumerate([1.0, small, small, small, 1.0, 1.0, small], start=1):
        model.zero_grad()
        record = one_step(model, [observer], torch.tensor([[first, 1.0]]), number=number).record
        dead.append(record["grad/dead/0"])
    assert dead == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_geometry_of_a_step_of_known_length() -> None:
    model = layer_of({"weight": "E4M3"}, torch.full((2, 2), 1.0), "grid")
    layers, observer = quantized_layers(model), None
    observer = Geometry(layers, EVERY)
    stiffness = fm.ulp(torch.tensor(1.0) / layers["0"].weight_scale()[0, 0], "E4M3") * layers["0"].weight_scale()[0, 0]
    updates = UpdateObserver(layers, "grid", [observer])
    record = one_step(model, [updates, observer], torch.ones(1, 2), lr=4 * float(stiffness)).record
    assert record["geometry/stiffness_mean/0"] == pytest.approx(float(stiffness))
    assert record["geometry/off_grid"] == 0.0
    assert record["geometry/path_length/0"] == record["geometry/displacement/0"] > 0
    assert record["geometry/warp_spread/0"] == 0.0
    record = one_step(model, [updates, observer], torch.zeros(1, 2), number=2).record
    assert record["geometry/warp_crossings/0"] == 0.0


def test_parameters_on_geoopts_stiefel_manifold_are_checked() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_parameter(
        "q", geoopt.ManifoldParameter(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), manifold=geoopt.Stiefel())
    )
    record = one_step(model, [Geometry({}, EVERY)], torch.ones(1, 2)).record
    assert record["geometry/orthogonality/q"] == record["geometry/orthogonality"] == 3.0


@pytest.mark.parametrize(("inputs", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_weights_that_meet_no_input_are_in_a_zero_gradient_zone(inputs: float, share: float) -> None:
    model = layer_of({"weight": "E4M3"}, torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    capture = Capture(1)
    observers = [capture, Zones(quantized_layers(model), capture, 1)]
    record = one_step(model, observers, torch.full((2, 4), inputs)).record
    assert record["stall/zero_gradient_zone/0"] == record["stall/zero_gradient_zone"] == share


def test_attention_that_looks_at_everything_alike_has_the_entropy_of_that() -> None:
    model = GPT(GPTShape(2, 2, 8, 4, vocab_size=5))
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.weight)
    tokens = torch.zeros(3, 4, dtype=torch.long)
    record = one_step(model, [AttentionEntropy(lambda: model(tokens), 1)], tokens).record
    uniform = sum(math.log(n) for n in range(1, 5)) / 4
    heads = [record[f"attention/entropy/{block}/{head}"] for block in range(2) for head in range(2)]
    assert [*heads, record["attention/entropy"], record["attention/entropy_min"]] == pytest.approx([uniform] * 6)


def test_looking_at_attention_leaves_the_scales() -> None:
    spec = {"activation": {"format": "E4M3", "policy": "delayed", "history": 16}}
    model = fm.quantize_model(GPT(GPTShape(1, 2, 8, 4, vocab_size=5)), {"*": spec}, "master")
    tokens = torch.zeros(3, 4, dtype=torch.long)
    model(tokens)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step = Step(1, model, torch.optim.SGD(model.parameters()))
    AttentionEntropy(lambda: model(tokens + 1), 1).after_step(step)
    after = dict(model.named_buffers())
    assert before
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_between_two_looks_the_model_has_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    capture = Capture(2)
    step = Step(1, model, torch.optim.SGD(model.parameters()))
    capture.before_forward(step)
    assert not model[0]._forward_hooks
    due = Step(2, model, step.optimizer)
    capture.before_forward(due)
    assert model[0]._forward_hooks
    model(torch.ones(1, 2)).sum().backward()
    capture.after_forward(due)
    assert not model[0]._forward_hooks
    assert set(capture.inputs) == set(capture.gradients) == {"0"}
    capture.written(due)
    assert not capture.inputs


def test_model_flops_utilisation_is_known_where_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(load_config(None))
    model = GPT(GPTShape(4, 4, 128, 64))
    weights = 4 * 12 * 128 * 128 + 257 * 128
    flops = flops_per_token(model, config)
    assert flops == 6 * weights + 12 * 4 * 128 * 64
    step = Step(3, model, torch.optim.SGD(model.parameters()), record={"val/loss": 1.0, "time/tokens_per_s": 1e5})
    with monkeypatch.context() as patched:
        patched.setattr("nanogpt_bench.observers.resources._peak_flops", lambda device: 2e12)
        Resources(model, config, torch.device("cpu")).written(step)
    assert step.record["mfu"] == pytest.approx(1e5 * flops / 2e12)
    assert (step.record["memory/peak_bytes"] or 0) > 1e7
    step.record.pop("mfu")
    Resources(model, config, torch.device("cpu")).written(step)
    assert "mfu" not in step.record
