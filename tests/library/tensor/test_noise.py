"""No two tensors round with the same draws, and none draws the same twice.

However they came to be: copies, loaded states, parameters that were added and removed,
running averages.
"""

import copy
import itertools
import math
import warnings

import pytest
import torch
from optimizer_cases import manifold_parameter, normal, same_bits
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import fp8manifold as fm
from fp8manifold import optim

N = 4000
VALUE = torch.full((N,), 1.03)  # 0.24 of a step above 1 in E4M3


def byte(seed: int | None) -> fm.FP8Parameter:
    options = {} if seed is None else {"seed": seed}
    return fm.FP8Parameter(torch.ones(N), "E4M3", scale=1.0, **options)


def moves_of_a_step(parameters, optimizers) -> list[Tensor]:
    old_values = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones(N)
    for optimizer in optimizers:
        optimizer.step()
    return [
        (p.detach() - old).as_subclass(Tensor)
        for p, old in zip(parameters, old_values, strict=True)
    ]


def assert_unrelated(moves: list[Tensor]) -> None:
    for a, b in itertools.combinations(moves, 2):
        assert (a != a[0]).any()
        assert abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]) < 4.5 / math.sqrt(N)


def make(parameters, **options):
    return optim.StiffnessAdamW(parameters, lr=0.03, stiffness=0.0, **options)


def wrapped(parameters):
    """Half of what SGD does, which is one step of E4M3 below 1."""
    return optim.StiffnessWrapper(
        torch.optim.SGD(parameters, lr=2.0**-4), 0.5, writeback="stochastic"
    )


def bytes_of_four_seeds():
    return [byte(seed) for seed in range(4)]


def grid_weights():
    """Manifolds have seeds; weights of one seed are told apart by their values."""
    seeds_and_values = ((1, 1.0), (2, 1.0), (1, 2.0))
    return [
        manifold_parameter(
            fm.FP8Manifold("E4M3", 1.0, "stochastic", seed=seed), torch.full((N,), x)
        )
        for seed, x in seeds_and_values
    ]


@pytest.mark.parametrize("make", [make, wrapped])
@pytest.mark.parametrize("weights", [bytes_of_four_seeds, grid_weights])
def test_one_optimizer_for_each_parameter(weights, make) -> None:
    parameters = weights()
    assert_unrelated(moves_of_a_step(parameters, [make([p]) for p in parameters]))


def test_averages_of_ordinary_parameters_with_an_optimizer_each() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(N)) for _ in range(3)]
    gradient, noise = torch.randn(N), []
    spacing = 2.0 ** torch.frexp(gradient * (1 - 0.9)).exponent
    for p in parameters:
        p.grad = gradient.clone()
        optimizer = make([p], moments="bfloat16")
        optimizer.step()
        noise.append((optimizer.state[p]["exp_avg"].float() - gradient * (1 - 0.9)) / spacing)
    assert_unrelated(noise)


def test_a_removed_parameters_stream_is_not_given_again() -> None:
    first, second, third = byte(5), byte(5), byte(5)
    optimizer = make([first, second])
    old = moves_of_a_step([first, second], [optimizer])
    removed_stream = optimizer.state.pop(first)["stream"]
    optimizer.param_groups[0]["params"].remove(first)
    optimizer.add_param_group({"params": [third]})
    resumed = copy.deepcopy(optimizer)
    assert_unrelated([*moves_of_a_step([second, third], [optimizer]), *old])
    streams = {optimizer.state[p]["stream"] for p in (second, third)}
    assert len({removed_stream, *streams}) == 3
    assert optimizer.state_dict()["streams_begun"] == resumed.streams_begun + 1 == 3


def with_loaded_state(optimizer):
    state = optimizer.state_dict()
    optimizer = wrapped(optimizer.param_groups[0]["params"])
    optimizer.load_state_dict(state)
    return optimizer


SUCCESSORS = {
    "itself": lambda optimizer: optimizer,
    "deepcopy": copy.deepcopy,
    "state": with_loaded_state,
}


@pytest.mark.parametrize("successor", SUCCESSORS.values(), ids=SUCCESSORS)
def test_a_removed_parameters_stream_is_not_given_again_by_a_wrapper(successor) -> None:
    first, second, third = byte(5), byte(5), byte(5)
    optimizer = wrapped([first, second])
    old = moves_of_a_step([first, second], [optimizer])
    removed_stream = optimizer.streams[first]
    optimizer.param_groups[0]["params"].remove(first)
    moves_of_a_step([second], [optimizer])
    assert (optimizer.streams.keys(), optimizer.streams_begun) == ({second}, 2)
    optimizer = successor(optimizer)
    (second,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        second.fill_(1.0)
    optimizer.add_param_group({"params": [third]})
    assert_unrelated([*moves_of_a_step([second, third], [optimizer]), *old])
    assert len({removed_stream, optimizer.streams[second], optimizer.streams[third]}) == 3


@pytest.mark.parametrize("lacking", ["streams", "streams_begun"])
def test_a_state_without_streams_is_refused(lacking) -> None:
    optimizer = wrapped([byte(0)])
    saved = optimizer.state_dict()
    del saved[lacking]
    with pytest.raises(ValueError, match=f"it lacks {lacking}$"):
        optimizer.load_state_dict(saved)


def test_a_cleared_state_draws_anew() -> None:
    parameter = byte(5)
    optimizer, moves = make([parameter]), []
    for _ in range(3):
        with torch.no_grad():
            parameter.fill_(1.0)
        moves += moves_of_a_step([parameter], [optimizer])
        optimizer.state.clear()
    assert_unrelated(moves)


def test_bare_parameters_have_seeds_of_their_own() -> None:
    torch.manual_seed(3)
    parameters = [byte(None) for _ in range(3)]
    torch.manual_seed(3)
    assert [byte(None).seed for _ in range(3)] == [p.seed for p in parameters]
    assert len({p.seed for p in parameters}) == 3
    with torch.no_grad():
        for p in parameters:
            p.copy_(VALUE)
    assert_unrelated(
        [(p.detach() - 1).dequantize() if isinstance(p, fm.FP8Tensor) else p for p in parameters]
    )


def test_a_wrapper_draws_apart_from_an_optimizer_that_draws_itself() -> None:
    parameters = [byte(0), byte(0), torch.nn.Parameter(VALUE.bfloat16())]
    inner = optim.StiffnessSGD(parameters, lr=2.0**-4, momentum=0.0)
    optimizer = optim.StiffnessWrapper(inner, 0.5, writeback="stochastic")
    for p in parameters:
        p.grad = torch.ones(N, dtype=p.dtype)
    optimizer.step()
    assert len({*optimizer.streams.values(), *(inner.state[p]["stream"] for p in parameters)}) == 6


def loaded(p):
    parameters = torch.nn.ParameterList([byte(1)])
    parameters.load_state_dict({"0": copy.deepcopy(p)})
    return parameters[0]


def exported(p):
    return fm.files.unflatten(torch.nn.ParameterList([p]).state_dict())["0"]


SAME_DRAWS = {
    "itself": lambda p: p,
    "deepcopy": copy.deepcopy,
    "loaded": loaded,
    "exported": exported,
}


@pytest.mark.parametrize("same_draws", SAME_DRAWS.values(), ids=SAME_DRAWS)
def test_draws_without_the_operator_s_name_stay_so(same_draws) -> None:
    new = byte(4)
    p = same_draws(
        fm.FP8Parameter.from_codes(new.codes, new.scale, "E4M3", seed=4, by_operator=False)
    )
    with torch.no_grad():
        p.add_(0.03)
    assert torch.equal(p.codes, fm.encode(VALUE, "E4M3", "stochastic", seed=4, step=0))


SNAPSHOTS = {
    "clone": Tensor.clone,
    "deepcopy": copy.deepcopy,
    "detached": lambda p: p.detach().clone(),
}


@pytest.mark.parametrize("snapshot", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_putting_a_snapshot_back_does_not_rewind_the_draws(snapshot) -> None:
    p, moves = byte(6), []
    with torch.no_grad():
        saved = snapshot(p)
        for _ in range(3):
            p.add_(0.03)
            moves.append(p.dequantize() - 1)
            p.copy_(saved)
            assert (p.dequantize() == 1).all()
    assert int(p.counter) == 3
    assert_unrelated(moves)


def quantized(rounding) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    return fm.quantize_model(model, "E4M3", "codes", rounding=rounding)


both_kinds = pytest.mark.parametrize(
    "options",
    [{"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"avg_fn": get_ema_avg_fn(0.9)}],
    ids=["of lists", "of tensors"],
)


@both_kinds
def test_an_average_of_codes_is_refused(options) -> None:
    with pytest.raises(
        TypeError, match=r"'0\.weight' in codes, where .*: use fp8manifold\.averaged_model\(model\)"
    ):
        AveragedModel(quantized("nearest"), **options)
    AveragedModel(fm.quantize_model(Averaged(), "E4M3", "master"), **options)


def test_an_average_of_bare_parameters_is_in_floats() -> None:
    model = torch.nn.Module()
    model.first = model.tied = byte(0)
    average = fm.averaged_model(model)
    with torch.no_grad():
        model.first.copy_(torch.full((N,), 2.0))
    for _ in range(2):
        average.update_parameters(model)
    assert average.module.first is average.module.tied
    assert type(average.module.first) is torch.nn.Parameter
    assert torch.equal(average.module.first, torch.full((N,), 2.0))


@pytest.mark.parametrize("kind", ["bfloat16", "codes", "codes and bfloat16"])
def test_an_average_of_bfloat16_or_codes_is_in_float32(kind) -> None:
    """An average in bfloat16 or codes would drop what is below half their spacing."""
    model = (
        quantized("nearest") if "codes" in kind else torch.nn.Sequential(torch.nn.Linear(64, 32))
    )
    model = model.to(torch.bfloat16 if "bfloat16" in kind else torch.float32)
    average = fm.averaged_model(model)
    means = [torch.zeros(p.shape) for p in model.parameters()]
    for count in range(4):
        for seed, (p, mean) in enumerate(zip(model.parameters(), means, strict=True)):
            with torch.no_grad():
                p.copy_(normal(*p.shape, seed=10 * count + seed))
            mean += (values_of(p).float() - mean) / (count + 1)
        average.update_parameters(model)
    for index, (averaged, mean) in enumerate(zip(average.module.parameters(), means, strict=True)):
        assert (averaged.dtype, type(averaged)) == (torch.float32, torch.nn.Parameter), index
        assert torch.equal(averaged, mean), index
        assert not torch.equal(averaged, averaged.bfloat16().float()), index


def values_of(p: Tensor) -> Tensor:
    return p.dequantize() if isinstance(p, fm.FP8Tensor) else p.detach()


class Averaged(torch.nn.Module):
    """Two linear layers, one with an extra buffer, and running statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 8)
        self.first.register_buffer("extra", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


SPECS = {
    "weights": fm.LayerSpec("E4M3"),
    "measured": fm.LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="split"),
    "delayed": fm.LayerSpec(
        "E4M3", activation={"format": "E4M3", "policy": "delayed"}, gradient="E5M2"
    ),
}


@both_kinds
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_an_average_is_the_plain_average(storage, spec, options) -> None:
    """It has the bits of torch's average of the same values in floats.

    In every storage, and of layers with scales, counts and manifolds. Buffers are copied.
    """
    torch.manual_seed(0)
    net = Averaged()
    plain = AveragedModel(copy.deepcopy(net), **options)
    model = fm.quantize_model(net, spec, storage)
    average, floats = fm.averaged_model(model, **options), copy.deepcopy(plain.module)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(normal(6, 8, seed=step)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.first.extra += 1
            for value, p in zip(floats.parameters(), model.parameters(), strict=True):
                value.copy_(values_of(p))
            for name, buffer in floats.named_buffers():
                buffer.copy_(model.get_buffer(name))
        plain.update_parameters(floats)
        average.update_parameters(model)
    assert list(average.state_dict()) == list(plain.state_dict())
    assert same_bits(average.state_dict().values(), plain.state_dict().values())
    assert not torch.equal(average.module.first.weight, model.first.weight)


@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_an_average_of_transposed_weights(storage) -> None:
    """GPT-2 has such weights; square ones could be averaged transposed unnoticed."""
    from transformers import pytorch_utils as layers

    torch.manual_seed(0)
    model = fm.quantize_model(
        torch.nn.Sequential(layers.Conv1D(8, 8), layers.Conv1D(4, 8)), "E4M3", storage
    )
    average = fm.averaged_model(model)
    for _ in range(2):
        average.update_parameters(model)
    for index, (averaged, layer) in enumerate(zip(average.module, model, strict=True)):
        assert torch.equal(averaged.weight, values_of(layer.weight).t()), index


def in_place(average: Tensor, weight: Tensor) -> None:
    average.mul_(0.999).add_(weight, alpha=0.001)


def over_lists(average: Tensor, weight: Tensor) -> None:
    torch._foreach_lerp_([average], [weight], 0.001)


def of_difference(average: Tensor, weight: Tensor) -> None:
    average.sub_(0.001 * (average - weight))


def put_back(average: Tensor, weight: Tensor) -> None:
    average.data.copy_(0.999 * average + 0.001 * weight)


def of_rows(average: Tensor, weight: Tensor) -> None:
    average[:2].lerp_(weight[:2], 0.001)


COPIES = {
    "detach, clone": lambda p: p.detach().clone(),
    "clone, detach": lambda p: p.clone().detach(),
    "deepcopy": lambda p: copy.deepcopy(p).requires_grad_(False),
    "deepcopy that trains": copy.deepcopy,
    "to": lambda p: p.detach().to("cpu", copy=True),
    "data": lambda p: p.data.clone(),
}


@pytest.mark.parametrize("update", [in_place, over_lists, of_difference, put_back, of_rows])
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_running_average_in_codes_warns_once(copy_of, update) -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1)
    average = copy_of(weight)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            update(average, weight.detach())
    assert [warning.category for warning in caught] == [fm.RepeatedRoundingWarning]
    assert "averaged_model" in str(caught[0].message)


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_running_average_that_begins_after_a_step_warns(copy_of) -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1)
    weight.grad = torch.ones(4, 32)
    fm.optim.StiffnessAdamW([weight]).step()
    weight.grad = None
    average = copy_of(weight)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            in_place(average, weight.detach())
    assert [warning.category for warning in caught] == [fm.RepeatedRoundingWarning]


@pytest.mark.extra("diffusers")
def test_a_running_average_of_diffusers_warns_in_codes_and_is_right_in_floats() -> None:
    from diffusers.training_utils import EMAModel

    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1)
    average = EMAModel([weight])
    for _ in range(3):
        average.step([weight])
    with pytest.warns(fm.RepeatedRoundingWarning, match="sub_ has changed a copy"):
        average.step([weight])
    average.step([weight])
    average = EMAModel([weight.detach().float()], min_decay=0.9, decay=0.9)
    average.step([weight])  # the first copies
    with torch.no_grad():
        weight.zero_()
    expected = average.shadow_params[0].clone()
    for _ in range(8):
        average.step([weight])
        expected -= 0.1 * expected
    torch.testing.assert_close(average.shadow_params[0], expected)


class StepsOnData(torch.optim.SGD):
    """Writes through ``data``, as many optimizers outside of torch do."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.mul_(0.999)
            p.data.add_(p.grad.data, alpha=-0.01)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "data": lambda parameters: StepsOnData(parameters, lr=1e-3),
    "StiffnessAdamW": lambda parameters: optim.StiffnessAdamW(parameters, lr=0.01),
    "wrapped": lambda parameters: optim.StiffnessWrapper(torch.optim.SGD(parameters, lr=1e-3)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("copied", ["itself", "deepcopy", "moved"])
def test_a_weight_that_is_trained_does_not_warn(copied, kind) -> None:
    layer = fm.quantize_model(torch.nn.Linear(32, 8), "E4M3", "codes", seed=1)
    layer = copy.deepcopy(layer) if copied == "deepcopy" else layer
    layer = layer.bfloat16().float() if copied == "moved" else layer
    optimizer = OPTIMIZERS[kind](layer.parameters())
    for _ in range(8):
        layer(normal(4, 32, seed=2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            layer.weight.data.mul_(0.999)


def test_a_copy_that_takes_other_values_does_not_warn() -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1)
    twin = weight.detach().clone()
    for seed in range(8):
        twin.copy_(weight)
        twin.copy_(normal(4, 32, seed=seed))
        twin.normal_()
    for factor in (0.5, 0.25, 0.125):
        weight.detach().clone().mul_(factor).add_(weight.detach()).sub_(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_plain_tensor_in_float(copy_of, dtype) -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1, dtype=dtype)
    plain = copy_of(weight).detach().float()
    assert (type(plain), plain.dtype) == (torch.Tensor, torch.float32)
    assert torch.equal(plain, weight.dequantize().float())
    plain.zero_()
    assert weight.dequantize().any()


@pytest.mark.parametrize("moved", ["itself", "deepcopy", "to", "pickle", "state"])
def test_a_parameter_in_codes_stays_one_in_float(moved, tmp_path) -> None:
    """However it was moved: `Module.float` treats a copy as it treats the original."""
    layer = fm.quantize_model(torch.nn.Linear(32, 8), "E4M3", "codes", seed=1)
    if moved == "deepcopy":
        layer = copy.deepcopy(layer.bfloat16())
    elif moved == "to":
        layer = layer.to(torch.bfloat16)
    elif moved == "pickle":
        torch.save(layer, tmp_path / "layer.pt")
        layer = torch.load(tmp_path / "layer.pt", weights_only=False)
    elif moved == "state":
        layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    for _ in range(2):
        layer = copy.deepcopy(layer.float())
        assert type(layer.weight) is fm.FP8Parameter
        assert layer.weight.dtype is torch.float32
    x = normal(4, 32, seed=2)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert type(layer.weight.float()) is fm.FP8Parameter


def test_the_gradient_goes_through_float() -> None:
    weight = fm.FP8Parameter(normal(4, 32, seed=1), "E4M3", seed=1)
    (3.0 * weight.clone().float()).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 32), 3.0))
