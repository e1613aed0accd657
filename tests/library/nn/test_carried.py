"""Hooks and attributes of a layer go over to the one that takes its place, and come
back, or are refused.
"""

import copy
import io
import pickle
import sys
import types

import pytest
import torch
from optimizer_cases import normal
from torch import nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
)

from fp8manifold import (
    LayerSpec,
    QuantizedLinear,
    dequantize_model,
    quantization_report,
    quantize_model,
)
from fp8manifold.files import layout_state_dict
from fp8manifold.nn._carried import turn, turn_back, turned_names

storages = pytest.mark.parametrize("storage", ["master", "grid", "codes"])
X = normal(3, 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


#: how each kind of hook is registered, with one that notes its name
HOOKS = {
    "forward": lambda layer, note: layer.register_forward_hook(
        lambda m, args, out: note("forward")
    ),
    "keywords": lambda layer, note: layer.register_forward_hook(
        lambda m, args, kwargs, out: note("keywords"), with_kwargs=True, always_call=True
    ),
    "pre": lambda layer, note: layer.register_forward_pre_hook(lambda m, args: note("pre")),
    "backward": lambda layer, note: layer.register_full_backward_hook(
        lambda m, gi, go: note("backward")
    ),
    "backward pre": lambda layer, note: layer.register_full_backward_pre_hook(
        lambda m, go: note("backward pre")
    ),
    "weight": lambda layer, note: layer.weight.register_hook(lambda g: note("weight")),
    "accumulated": lambda layer, note: layer.weight.register_post_accumulate_grad_hook(
        lambda p: note("accumulated")
    ),
    "save": lambda layer, note: layer.register_state_dict_pre_hook(
        lambda m, prefix, keep: note("save")
    ),
    "saved": lambda layer, note: layer.register_state_dict_post_hook(
        lambda m, s, prefix, meta: note("saved")
    ),
    "load": lambda layer, note: layer.register_load_state_dict_pre_hook(
        lambda m, *args: note("load")
    ),
    "loaded": lambda layer, note: layer.register_load_state_dict_post_hook(
        lambda m, keys: note("loaded")
    ),
}


def used(net: nn.Module, heard: list[str]) -> set[str]:
    heard.clear()
    net(X.clone().requires_grad_()).sum().backward()
    net.load_state_dict(net.state_dict())
    return set(heard)


@storages
def test_hooks_of_every_kind_go_over_and_come_back(storage) -> None:
    heard = []
    net = model()
    handles = {name: register(net[1], heard.append) for name, register in HOOKS.items()}
    assert used(net, heard) == set(HOOKS)
    quantize_model(net, {"*": LayerSpec("E4M3")}, storage)
    assert used(net, heard) == set(HOOKS)
    handles.pop("forward").remove()
    handles.pop("accumulated").remove()
    assert used(net, heard) == set(handles)
    dequantize_model(net)
    assert type(net[1]) is nn.Linear
    assert used(net, heard) == set(handles)
    for handle in handles.values():
        handle.remove()
    assert used(net, heard) == set()
    assert len(net[1]._forward_pre_hooks) == 0


def check_contents(net: nn.Module, gradient: torch.Tensor) -> None:
    layer = net[1]
    assert layer.note == "stays"
    assert layer.weight.decay == 0.5
    assert layer.seen.tolist() == [1, 1]
    assert layer.gain.numel() == 3
    assert type(layer.adapter) is nn.LayerNorm
    assert torch.equal(layer.weight.grad, gradient)
    assert "1.gain" in net.state_dict()
    assert "1.seen" not in net.state_dict()


@storages
def test_attributes_and_what_is_registered_go_over_and_come_back(storage) -> None:
    net = model()
    layer = net[1]
    layer.note = "stays"
    layer.weight.decay = 0.5
    layer.adapter = nn.LayerNorm(2)
    layer.register_buffer("seen", torch.ones(2), persistent=False)
    layer.register_parameter("gain", nn.Parameter(torch.ones(3)))
    net(X).sum().backward()
    gradient = layer.weight.grad
    quantize_model(net, {"1": "E4M3"}, storage)
    check_contents(net, gradient)
    floats = dequantize_model(net)
    check_contents(floats, gradient)
    assert set(vars(floats[1])) - set(vars(nn.Linear(1, 1))) == {"note"}
    assert set(floats[1]._modules) == {"adapter"}


def orders(net, known) -> tuple[list[str], list[str]]:
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    return names, [name for name in net.state_dict() if name in known]


@pytest.mark.parametrize("tied", ["refuse", "untie", "leave"])
@storages
def test_parameters_and_state_keep_their_order(storage, tied) -> None:
    """Optimizers' states, averages and communication go by order."""

    def make_net() -> nn.Sequential:
        net = nn.Sequential(
            nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        )
        net[1].register_parameter("extra", nn.Parameter(torch.zeros(2)))
        bias = net[3].bias
        net[3].bias = None
        net[3]._parameters = {
            "first": nn.Parameter(torch.ones(1)),
            "bias": bias,
            "weight": net[3].weight,
        }
        if tied != "refuse":
            net.append(nn.Linear(8, 8))
            net[4].weight = net[0].weight
        return net

    net = make_net()
    known = set(net.state_dict())
    expected = orders(net, known)
    net = quantize_model(
        net, {"*": LayerSpec("E4M3", activation="E5M2", rounding="split")}, storage, tied=tied
    )
    assert orders(net, known) == orders(copy.deepcopy(net), known) == expected
    net.load_state_dict(copy.deepcopy(net).state_dict(), assign=True)
    assert orders(net, known) == orders(copy.deepcopy(net), known) == expected
    assert orders(dequantize_model(net), known) == expected


@pytest.mark.parametrize("bias", [True, False])
@storages
def test_parameters_of_a_layer_keep_their_order(storage, bias) -> None:
    linear = nn.Linear(8, 8, bias=bias)
    names = [*linear._parameters]
    assert [*QuantizedLinear(linear, LayerSpec("E4M3"), storage)._parameters] == names


@pytest.mark.parametrize(
    ("name", "value"),
    [("spec", 1), ("weight_codes", 1), ("weight_scaler", nn.ReLU())],
    ids=["spec", "weight_codes", "weight_scaler"],
)
def test_an_attribute_without_a_place_is_refused(name, value) -> None:
    net = model()
    setattr(net[1], name, value)
    with pytest.raises(
        ValueError, match=f"layer '1' has the attribute '{name}', a name that QuantizedLinear uses"
    ):
        quantize_model(net, "E4M3")
    assert type(net[0]) is nn.Linear


def test_an_attribute_of_a_weight_without_a_place_is_refused() -> None:
    net = model()
    net[1].weight.codes = 1
    with pytest.raises(ValueError, match="the weight of '1' has the attribute 'codes'"):
        quantize_model(net, "E4M3", "codes")


def test_a_layer_in_two_places_comes_back_as_one() -> None:
    layer = QuantizedLinear(nn.Linear(8, 8), LayerSpec("E4M3"))
    net = dequantize_model(nn.Sequential(layer, nn.ReLU(), layer))
    assert net[0] is net[2]
    assert type(net[0]) is nn.Linear


def pruned(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.5)


#: by name: what changes a layer, words of the refusal, and what undoes the change
CHANGES = {
    "pruned": (pruned, r"prune\.remove\(layer, 'weight'\)", lambda m: prune.remove(m, "weight")),
    "weight_norm": (nn.utils.weight_norm, r"remove_weight_norm\(layer\)", remove_weight_norm),
    "spectral_norm": (
        nn.utils.spectral_norm,
        r"remove_spectral_norm\(layer\)",
        remove_spectral_norm,
    ),
    "parametrised": (
        parametrizations.weight_norm,
        "remove_parametrizations for its 'weight'",
        lambda m: parametrize.remove_parametrizations(m, "weight"),
    ),
    "forward": (
        lambda m: setattr(m, "forward", len),
        "its forward was replaced on the object",
        lambda m: delattr(m, "forward"),
    ),
    # What compile() does, without the compiler.
    "compiled": (
        lambda m: setattr(m, "_compiled_call_impl", m._call_impl),
        "compile then",
        lambda m: setattr(m, "_compiled_call_impl", None),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "formats",
    [{"1": "E4M3"}, {"*": "E4M3", "1": LayerSpec(activation="E4M3")}],
    ids=["alone", "among others"],
)
@storages
def test_a_changed_layer_that_is_named_is_refused(storage, formats, change) -> None:
    do, message, _ = CHANGES[change]
    net = model()
    do(net[1])
    state = [(name, id(x)) for name, x in net.named_parameters()]
    with pytest.raises(ValueError, match=message):
        quantize_model(net, formats, storage)
    assert [(name, id(x)) for name, x in net.named_parameters()] == state


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*spectral_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
@storages
def test_a_changed_layer_is_left_until_the_change_is_undone(storage, change) -> None:
    do, message, undo = CHANGES[change]
    net = model()
    do(net[1])
    kind = type(net[1])
    quantize_model(net, {"*": "E4M3"}, storage)
    assert [type(layer) for layer in net] == [QuantizedLinear, kind]
    (skipped,) = quantization_report(net).left
    assert message.partition("(")[0].replace("\\", "") in skipped.detail
    undo(net[1])
    quantize_model(net, {"0": "none", "1": "E4M3"}, storage)
    assert type(net[1]) is QuantizedLinear


def test_a_named_layer_is_left_by_naming_it_again() -> None:
    net = model()
    pruned(net[1])
    quantize_model(net, {"?": "E4M3", "1": "none"})
    assert type(net[0]) is QuantizedLinear
    with pytest.raises(
        ValueError, match=r"pattern '\*' matches only layers that can't be quantised, such as '0'"
    ):
        quantize_model(nn.Sequential(net[1]), "E4M3")


def halved(layer: nn.Module, name: str = "weight") -> None:
    class Half(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values / 2

    parametrize.register_parametrization(layer, name, Half())


COMPUTED = pytest.mark.parametrize("compute", [halved, pruned])


@COMPUTED
@storages
def test_a_weight_that_is_computed_later_is_reported_as_it_is(compute, storage) -> None:
    net = quantize_model(model(), "E4M3", storage)
    compute(net[1])
    report = quantization_report(net)
    assert [layer.name for layer in report.left] == ["1"]
    assert "first" in report.left[0].detail
    assert report.parameters == sum(p.numel() for p in net.parameters())
    assert report.quantized_parameters == 64 + 32 * (storage == "codes")


@COMPUTED
@storages
def test_a_weight_that_is_computed_later_is_not_exported(compute, storage) -> None:
    net = quantize_model(model(), "E4M3", storage)
    compute(net[1])
    with pytest.raises(ValueError, match=r"layer '1' can't be exported: it.* first$"):
        layout_state_dict(net)


@storages
def test_a_bias_that_is_computed_later_is_added(storage) -> None:
    net = quantize_model(nn.Linear(8, 8), "E4M3", storage)
    old_output = net(X)
    bias = net.bias.detach().clone()
    halved(net, "bias")
    torch.testing.assert_close(net(X), old_output - bias / 2)


class Experts(nn.Module):
    """A module of a class that can be imported, as a pickle needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(normal(2, 8, 4))
        self.down = nn.Parameter(normal(2, 4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up @ self.down


@pytest.mark.parametrize(
    "twin",
    [
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: torch.load(saved(net), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("names", [["0.up"], ["0.up", "0.down"]], ids=["one", "both"])
def test_modules_that_hold_parameters_transposed_are_copied(twin, names, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(Experts=Experts))
    net = nn.Sequential(Experts())
    expected = net(X)
    turn(net, names)
    copied = twin(net)
    assert turned_names(copied) == names
    assert torch.equal(copied(X), expected)
    turn_back(copied)
    assert type(copied[0]) is Experts
    assert torch.equal(copied(X), expected)


def saved(net: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return file
