"""Parameters that become codes in place: convolutions, embeddings, experts.

The model's own code stays as it is and computes with the values of the codes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import normal, step_from, through_disk
from surgery_models import TOKENS, Model, layers, model_bits, stored
from tensor_cases import FORMATS, GRANULARITIES, same_store
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import FP8Parameter, LayerSpec, QuantizedLinear, quantize_model
from fp8manifold.files import load_into
from fp8manifold.tensor import FP8Tensor


class Language(nn.Module):
    """An embedding, experts in one parameter, and a head that may share the embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 32, padding_idx=0)
        self.inner = nn.Linear(32, 32)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(3, 16, 32))
        self.experts.bias = nn.Parameter(torch.randn(16))
        self.head = nn.Linear(32, 12, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.tokens(tokens))
        up = self.experts.up
        mixed = [
            nn.functional.linear(x, up[index], self.experts.bias) @ up[index] for index in range(3)
        ]
        return self.head(x + sum(mixed))


def seeded(kind, *args, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args, **options)


def float_copy(model: nn.Module) -> nn.Module:
    return fm.dequantize_model(copy.deepcopy(model))


def gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(*inputs).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_computes_as_floats(model: nn.Module, *inputs: Tensor) -> None:
    floats = float_copy(model)
    assert torch.equal(model(*inputs), floats(*inputs))
    actual, expected = gradients(model, *inputs), gradients(floats, *inputs)
    assert list(actual) == list(expected)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_computes_with_the_values_of_its_codes(granularity, tied) -> None:
    model = quantize_model(
        seeded(Language, tied),
        "E4M3",
        "codes",
        granularity=granularity,
        parameters="experts.*",
        embeddings="E4M3",
    )
    assert model.experts.up.granularity == ("row" if granularity == "channel" else granularity)
    assert model.tokens.weight.granularity == granularity
    assert (model.head.weight is model.tokens.weight) == tied
    assert isinstance(model.head, QuantizedLinear) != tied
    assert not isinstance(model.experts.bias, FP8Parameter)
    assert len({p.seed for p in model.parameters() if isinstance(p, FP8Parameter)}) == (
        3 if tied else 4
    )
    assert_computes_as_floats(model, TOKENS)


def test_experts_have_a_scale_a_row() -> None:
    weight = torch.randn(3, 4, 32) * torch.tensor([1.0, 2.0**9, 2.0**-9])[:, None, None]
    experts = FP8Parameter(weight, "E4M3", granularity="row", seed=1)
    flat = FP8Parameter(weight.view(12, 32), "E4M3", seed=1)
    assert experts.scale.shape == (3, 4, 1)
    assert torch.equal(experts.codes.view(12, 32), flat.codes)
    assert torch.equal(experts.scale.view(12, 1), flat.scale)
    back = FP8Tensor.from_codes(experts.codes, experts.scale, "E4M3")
    assert back.granularity == "row"
    assert torch.equal(back.dequantize(), experts.dequantize())
    state = fm.files.unflatten(torch.nn.ParameterDict({"w": experts}).state_dict())
    assert state["w"].granularity == "row"


def test_a_scale_a_row_is_a_channel_s_or_a_tensor_s_in_fewer_dimensions() -> None:
    weight = torch.randn(3, 4, 32)
    assert FP8Parameter(weight[0], "E4M3", granularity="row").granularity == "channel"
    assert FP8Parameter(weight[0, 0], "E4M3", granularity="row").granularity == "tensor"
    assert FP8Parameter(weight[:0], "E4M3", granularity="row").scale.shape == (0, 4, 1)


#: Ways to take some of the experts, or of their rows.
PARTS = {
    "one": lambda x: x[1],
    "last": lambda x: x[-1],
    "by tensor": lambda x: x[torch.tensor(2)],
    "from": lambda x: x[1:],
    "every second": lambda x: x[::2],
    "first of some": lambda x: x[1:][0],
    "transposed": lambda x: x[1].t(),
    "row of one": lambda x: x[1][2:3],
    "unbind": lambda x: x.unbind()[2],
    "split": lambda x: x.split(2)[1],
}
granularities = pytest.mark.parametrize("granularity", ["tensor", "channel", "row", "block"])


@granularities
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_part_of_the_experts_is_decoded_alone(part, granularity, monkeypatch) -> None:
    experts = FP8Parameter(seeded(torch.randn, 3, 4, 64), "E4M3", granularity=granularity, seed=1)
    values = experts.dequantize()
    monkeypatch.setattr(FP8Tensor, "dequantize", None)
    assert torch.equal(part(experts.detach()) * 1, part(values))


@granularities
def test_a_backward_pass_decodes_the_expert_that_was_used(granularity, monkeypatch) -> None:
    experts = FP8Parameter(seeded(torch.randn, 3, 4, 64), "E4M3", granularity=granularity, seed=1)
    monkeypatch.setattr(FP8Tensor, "dequantize", None)
    x = torch.randn(2, 64)
    nn.functional.linear(x, experts[1]).sum().backward()
    assert torch.equal(experts.grad[1], x.sum(0).expand(4, 64))
    assert not experts.grad[0].any()


@granularities
def test_an_embedding_decodes_the_rows_that_are_looked_up(granularity, monkeypatch) -> None:
    table = FP8Parameter(seeded(torch.randn, 12, 32), "E5M2", granularity=granularity)
    expected = table.dequantize()[TOKENS]
    monkeypatch.setattr(FP8Tensor, "dequantize", None)
    rows = nn.functional.embedding(TOKENS, table)
    assert torch.equal(rows, expected)
    rows.sum().backward()
    assert table.grad.sum() == TOKENS.numel() * 32


@pytest.mark.parametrize(
    "options",
    [{}, {"moments": "8bit"}, {"moments": "8bit", "writeback": "residual8"}],
    ids=["float32", "8bit", "8bit residual8"],
)
def test_experts_step_as_a_matrix_of_all_their_rows(options) -> None:
    weight = seeded(torch.randn, 3, 4, 32)
    experts = FP8Parameter(weight, "E4M3", granularity="row", seed=1)
    flat = FP8Parameter(weight.view(12, 32), "E4M3", granularity="row", seed=1)
    steppers = [fm.optim.StiffnessAdamW([p], lr=3e-2, **options) for p in (experts, flat)]
    for step in range(4):
        gradient = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(step))
        for parameter, optimizer in zip((experts, flat), steppers, strict=True):
            step_from(optimizer, parameter, gradient.view(parameter.shape))
    assert torch.equal(experts.codes.view(12, 32), flat.codes)
    assert torch.equal(experts.scale.view(12, 1), flat.scale)
    assert not torch.equal(experts.dequantize(), weight)


def test_muon_takes_each_expert_as_a_matrix_of_its_own() -> None:
    weight, gradient = seeded(torch.randn, 2, 3, 16, 32).unbind()
    holder = nn.Module()
    holder.up = FP8Parameter(weight, "E2M5", granularity="row", seed=1)
    values = holder.up.dequantize()
    optimizer = fm.optim.StiffnessMuon.for_model(holder, 0.5, moments="8bit", weight_decay=0.0)
    matrices = nn.ParameterList([nn.Parameter(matrix.clone()) for matrix in values])
    matrix_optimizer = fm.optim.StiffnessMuon.for_model(matrices, 0.5, weight_decay=0.0)
    holder.up.grad = gradient
    for parameter, matrix_gradient in zip(matrices, gradient, strict=True):
        parameter.grad = matrix_gradient
    optimizer.step()
    matrix_optimizer.step()
    moved = torch.stack([p.detach() for p in matrices])
    assert (moved - values).abs().mean() > 0.05
    assert (holder.up.dequantize() - moved).abs().mean() < 0.25 * (moved - values).abs().mean()


#: name: (layer, shape of its input)
CONVOLUTIONS = {
    "Conv1d": (nn.Conv1d(4, 6, 3), (2, 4, 8)),
    "Conv2d": (nn.Conv2d(4, 6, (3, 2), padding=1, groups=2), (2, 4, 5, 5)),
    "Conv3d": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
}


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(layer, shape) -> None:
    """They compute with the values of their codes, a scale for each output, and learn."""
    model = quantize_model(
        nn.Sequential(copy.deepcopy(layer), nn.Linear(1, 1)), "E4M3", "codes", parameters="0.weight"
    )
    weight = model[0].weight
    assert weight.scale.shape == (layer.weight.shape[0], *(1 for _ in layer.weight.shape[1:]))
    x, old_codes = seeded(torch.randn, *shape), weight.codes.clone()
    assert_computes_as_floats(model[0], x)
    optimizer = fm.optim.StiffnessMuon.for_model(model[0], 1e-1, moments="8bit")
    model[0](x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight.codes, old_codes)


def test_a_tied_embedding_is_one_tensor_of_three_bytes_under_muon() -> None:
    model = quantize_model(
        seeded(Language), "E4M3", "codes", parameters="*.up", embeddings="E4M3", tied="leave"
    )
    actual, expected = gradients(model, TOKENS), gradients(float_copy(model), TOKENS)
    assert torch.equal(actual["tokens.weight"], expected["tokens.weight"])  # summed over both uses
    optimizer = fm.optim.StiffnessMuon.for_model(model, 1e-2, moments="8bit")
    group = next(
        g for g in optimizer.param_groups if any(p is model.tokens.weight for p in g["params"])
    )
    assert group["direction"] == "adam"
    old_codes = model.head.weight.codes.clone()
    optimizer.step()
    assert model.head.weight is model.tokens.weight
    assert not torch.equal(model.head.weight.codes, old_codes)
    state = optimizer.state[model.tokens.weight]
    tensors = [x for x in state.values() if isinstance(x, Tensor)]
    moments = [x for x in tensors if x.shape == model.tokens.weight.shape]
    assert [x.dtype for x in moments] == [torch.uint8, torch.uint8]


def test_states_are_saved_and_loaded() -> None:
    options = {"parameters": {"*.up": "E3M4"}, "embeddings": "E5M2"}
    model = quantize_model(seeded(Language, False), "E4M3", "codes", **options)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2)
    model(TOKENS).square().sum().backward()
    optimizer.step()
    with torch.random.fork_rng():
        loaded = quantize_model(Language(False), "E4M3", "codes", seed=5, **options)
    loaded.load_state_dict(through_disk(model.state_dict()))
    assert model_bits(loaded) == model_bits(model)
    assert {"experts.up", "experts.up_scale", "tokens.weight_traits"} <= set(model.state_dict())
    assert model_bits(copy.deepcopy(model)) == model_bits(model)
    state = {name: x.clone() for name, x in float_copy(model).state_dict().items()}
    state["experts.up"] *= 2.0**20
    loaded.load_state_dict(state)  # floats are rounded at scales of their own
    assert torch.equal(loaded.experts.up.dequantize(), state["experts.up"])


@pytest.mark.parametrize("tied", ["refuse", "leave", "untie"])
def test_models_are_read_into_codes_where_they_are(tied) -> None:
    with torch.device("meta"):
        model = Language()
    options = {"parameters": "*.up", "embeddings": "E4M3", "tied": tied, "seed": 3}
    floats = seeded(Language)
    state = {name: x.clone() for name, x in floats.state_dict().items()}
    expected = quantize_model(floats, "E4M3", "codes", **options)
    loaded = load_into(model, state, "E4M3", **options)
    assert model_bits(loaded) == model_bits(expected)
    assert (loaded.head.weight is loaded.tokens.weight) == (tied != "untie")


def test_the_report_and_the_way_back() -> None:
    model = seeded(Language)
    quantize_model(model, "E4M3", "codes", parameters=["*.up"], embeddings="E5M2", tied="leave")
    report = fm.quantization_report(model)
    details = {layer.name: layer.detail for layer in report.quantized}
    assert details["experts"] == "up=E4M3, storage=codes"
    assert details["tokens"] == details["head"] == "weight=E5M2, storage=codes"
    assert report.quantized_parameters == 12 * 32 + 32 * 32 + 3 * 16 * 32
    assert report.left == ()
    values, tensors = float_copy(model), dict(fm.files.layout_state_dict(model)[0])
    assert torch.equal(tensors["experts.up"], values.experts.up)
    assert torch.equal(tensors["tokens.weight"], values.tokens.weight)
    assert tensors["inner.weight"].dtype == torch.float8_e4m3fn
    fm.dequantize_model(model)
    assert not any(isinstance(p, FP8Tensor) for p in model.parameters())
    assert model.head.weight is model.tokens.weight


def test_attributes_gradients_and_what_is_not_trained_go_over() -> None:
    model, hook_calls = seeded(Language), []
    model.experts.up.requires_grad_(False)
    model.tokens.weight.mark = "mine"
    model.tokens.weight.register_hook(lambda gradient: hook_calls.append("tokens"))
    quantize_model(
        model, {"*": "none"}, "codes", parameters={"*.up": "E4M3"}, embeddings={"tokens": "E4M3"}
    )
    assert (model.experts.up.requires_grad, model.tokens.weight.mark) == (False, "mine")
    model(TOKENS).sum().backward()
    assert hook_calls == ["tokens"]
    assert model.experts.up.grad is None


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_weight_is_the_grids_in_one_byte(name, granularity) -> None:
    """Storage "codes" has the values, codes and scales of storage "grid".

    At one headroom, and where a grid has the granularity.
    """
    linear, x = nn.Linear(64, 6), normal(3, 64)
    twin = copy.deepcopy(linear)
    layer = quantize_model(linear, LayerSpec(name, granularity=granularity), "codes", headroom=2.0)
    assert isinstance(layer.weight, fm.FP8Parameter)
    assert layer.bias is linear.bias
    assert layer.weight.granularity == granularity
    values = fm.decode(layer.weight_codes(), name) * layer.weight_scale()
    assert torch.equal(layer(x), F.linear(x, values, linear.bias))
    assert torch.equal(layer.weight_codes(), layer.weight.codes)
    assert layer.weight_codes().data_ptr() != layer.weight.codes.data_ptr()
    if granularity != "block":
        grid = quantize_model(twin, LayerSpec(name, granularity=granularity), "grid", headroom=2.0)
        assert torch.equal(layer.weight_codes(), grid.weight_codes())
        assert torch.equal(layer.weight_scale(), grid.weight_scale())
        assert torch.equal(layer(x), grid(x))


def first_residuals(model: nn.Module) -> list[Tensor]:
    """Take a first step of size 0, and return the residuals that it began with."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer = fm.optim.StiffnessSGD(
        model.parameters(), lr=1e-9, momentum=0.9, writeback="residual8"
    )
    optimizer.step()
    return [optimizer.state[layer.weight]["residual"] for layer in layers(model)]


TRIPS = {
    "dict": dict,
    "file": through_disk,
    "file of tensors": lambda state: through_disk(fm.files.unflatten(state)),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_what_rounding_left_is_part_of_the_state(trip, assign) -> None:
    """Residuals begin with it after a state was loaded, as they do before.

    It leaves the state when an optimizer has taken it.
    """
    model, loaded = stored(keep_remainder=True), stored(seed=1)
    state = trip(model.state_dict())
    expected = [layer.weight.remainder.clone() for layer in layers(model)]
    loaded.load_state_dict(copy.deepcopy(state) if assign else state, assign=assign)
    for net in (loaded, model):
        for index, (residual, remainder) in enumerate(
            zip(first_residuals(net), expected, strict=True)
        ):
            assert remainder.count_nonzero() > 0, index
            assert torch.equal(residual, remainder), index
    assert not any("remainder" in name for name in model.state_dict())
    assert model.state_dict(keep_vars=True)["lm_head.weight"] is model.lm_head.weight
    model = stored(keep_remainder=True)
    model.load_state_dict(
        {name: 0.7 * x for name, x in Model().state_dict().items()}, assign=assign
    )
    assert all(r.count_nonzero() > 0 for r in first_residuals(model))  # what floats leave


@pytest.mark.parametrize("writeback", ["stochastic", "nearest", "residual8"])
def test_a_step_makes_the_remainder_void_for_all_that_share_it(writeback) -> None:
    """No later optimizer may begin with it: the new codes have left something else."""
    model = stored(keep_remainder=True)
    shared = model.state_dict()["lm_head.weight_remainder"]
    assert shared.count_nonzero() > 0
    optimizer = fm.optim.StiffnessSGD(
        model.parameters(), lr=0.01, momentum=0.9, writeback=writeback
    )
    model(TOKENS).sum().backward()
    optimizer.step()
    assert model.lm_head.weight.remainder is None
    assert shared.count_nonzero() == 0


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scale", [2.0**-9, 1.0, 500.0])
def test_a_float_checkpoint_is_rounded_at_a_scale_of_its_own(assign, scale) -> None:
    floats = Model()
    for p in floats.parameters():
        p.data *= scale
    model = stored(headroom=8.0, seed=4)
    model.load_state_dict(through_disk(floats.state_dict()), assign=assign)
    expected = quantize_model(floats, "E4M3", "codes", headroom=8.0, seed=4)
    for index, (a, b) in enumerate(zip(layers(model), layers(expected), strict=True)):
        assert same_store(a.weight, b.weight), index
        assert (type(a.weight), a.weight.seed, a.weight.requires_grad) == (
            fm.FP8Parameter,
            b.weight.seed,
            True,
        ), index
