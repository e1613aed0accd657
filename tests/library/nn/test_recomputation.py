"""Layers under checkpointing, inside torch's own encoder, and over nested tensors.

And what the options of a `LayerSpec` are for each operand.
"""

import copy
import pickle
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from optimizer_cases import frozen, normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8manifold import LayerSpec, OperandSpec, QuantizedLinear, quantize_model

SPECS = {
    "stochastic": LayerSpec("E4M3", activation="E4M3", gradient="E5M2", rounding="stochastic"),
    "delayed": LayerSpec("E4M3", activation="E4M3", policy="delayed", history=3),
}
#: Without reentrance it is the graph that asks for what has to be recomputed.
ways = pytest.mark.parametrize("reentrant", [False, True], ids=["graph", "reentrant"])


def net(spec: LayerSpec) -> nn.Module:
    torch.manual_seed(0)
    return quantize_model(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), spec, storage="master"
    )


def state_after(run) -> list:
    """Return the state and the gradients after a pass by `run`."""
    model = net(LayerSpec("E4M3", activation="E4M3"))
    run(model, normal(3, 8).requires_grad_()).square().sum().backward()
    return frozen((model.state_dict(), [p.grad for p in model.parameters()]))


@ways
def test_a_pass_that_remembers_nothing_is_repeated(reentrant) -> None:
    repeated = state_after(partial(checkpoint, use_reentrant=reentrant))
    assert repeated == state_after(lambda model, x: model(x))


@ways
@pytest.mark.parametrize("spec", SPECS)
def test_one_that_would_round_otherwise_is_refused(spec, reentrant) -> None:
    out = checkpoint(net(SPECS[spec]), normal(3, 8).requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(
        RuntimeError, match=r"QuantizedLinear\(in_features=8.* leave it out of activation"
    ) as refusal:
        out.sum().backward()
    assert "\n" not in str(refusal.value)


def test_a_new_pass_within_the_backward_pass_is_one_more() -> None:
    layer = QuantizedLinear(nn.Linear(8, 8), SPECS["stochastic"], storage="master")
    x = normal(3, 8).requires_grad_()

    def once_more(gradient: Tensor) -> None:
        with torch.no_grad():
            layer(normal(3, 8))

    x.register_hook(once_more)
    layer(x).sum().backward()
    assert int(layer.draws) == 2


def test_without_gradients_nothing_changes() -> None:
    layer = QuantizedLinear(nn.Linear(8, 8), SPECS["delayed"], storage="master")
    with torch.no_grad():
        layer(normal(3, 8))
        layer(normal(3, 8))
    assert layer.activation_scaler.history.count_nonzero() == 2


pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype:UserWarning"
)
X = normal(3, 5, 32, seed=3)
PADDING = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [4]])
#: one scale a token, so that padding has no say in those of the others
TOKENS = LayerSpec("E4M3", activation={"format": "E4M3", "granularity": "channel"}, gradient="E5M2")


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    for i, p in enumerate(stack.parameters()):
        p.data = p.data + normal(*p.shape, seed=i, std=0.1)
    return stack.eval()


@contextmanager
def without_fused_operators():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize(
    "copied",
    [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["itself", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "nested"])
@pytest.mark.parametrize("pattern", ["*", "layers.1"])
@pytest.mark.parametrize("storage", ["master", "grid", "codes", "bare"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_in_evaluation_calls_its_layers(mode, storage, pattern, padding, copied) -> None:
    """Also where torch would compute a whole encoder by one fused operator.

    With storage "bare" nothing but weights is quantised.
    """
    if storage == "bare":
        quantized = quantize_model(encoder(), {pattern: LayerSpec("E4M3")}, "codes")
    else:
        quantized = quantize_model(encoder(), {pattern: TOKENS}, storage)
    model = copied(quantized)
    with mode():
        output = model(X, src_key_padding_mask=padding)
        with without_fused_operators():
            expected = model(X, src_key_padding_mask=padding)
    tokens = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(output[tokens], expected[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_rows_are_quantised_as_one_tensor(layout) -> None:
    layer = QuantizedLinear(
        nn.Linear(32, 8), LayerSpec("E4M3", activation="E4M3", gradient="E5M2"), storage="master"
    )
    parts = [normal(n, 32, seed=n, std=n) for n in (2, 5, 1)]
    rows = torch.cat(parts).requires_grad_()
    expected = layer(rows)
    expected.sum().backward()
    grads = [rows.grad, layer.weight.grad]
    layer.zero_grad()
    leaves = [part.clone().requires_grad_() for part in parts]
    out = layer(torch.nested.as_nested_tensor(leaves, layout=layout))
    assert out.layout == layout
    assert [tuple(part.shape) for part in out.unbind()] == [(2, 8), (5, 8), (1, 8)]
    assert torch.equal(torch.cat(out.unbind()), expected)
    torch.cat(out.unbind()).sum().backward()
    rows_grad, weight_grad = grads
    assert torch.equal(torch.cat([leaf.grad for leaf in leaves]), rows_grad)
    assert torch.equal(layer.weight.grad, weight_grad)


def test_a_format_is_short_for_an_operand() -> None:
    assert LayerSpec("E4M3").weight == LayerSpec({"format": "e4m3"}).weight == OperandSpec("E4M3")
    assert LayerSpec({"format": "none"}) == LayerSpec()


@pytest.mark.parametrize(
    "gradient",
    ["E5M2", {"format": "E5M2"}, OperandSpec("E5M2")],
    ids=["name", "dict", "operand"],
)
def test_one_gradient_is_both(gradient) -> None:
    spec = LayerSpec(gradient=gradient)
    assert spec.activation_gradient == spec.weight_gradient == OperandSpec("E5M2")


def test_a_gradient_may_be_of_one_product_or_none() -> None:
    only = LayerSpec(gradient={"weight": {"format": "E5M2", "rounding": "stochastic"}})
    assert only.activation_gradient is None
    assert only.weight_gradient == OperandSpec("E5M2", rounding="stochastic")
    assert LayerSpec(gradient={"activation": "none", "weight": None}).quantizes_nothing


def test_what_an_operand_leaves_out_is_the_layers() -> None:
    spec = LayerSpec(
        "E4M3", "E4M3", "block", "delayed", "clipped", gradient="E5M2", rounding="split", history=20
    )
    of_weight = OperandSpec("E4M3", "block", "delayed", 20, "nearest", ste="clipped")
    of_activation = OperandSpec("E4M3", "tensor", "delayed", 20, "nearest", ste="clipped")
    of_gradient = OperandSpec("E5M2", "tensor", "delayed", 20, "stochastic")
    assert spec.operand("weight") == of_weight
    assert spec.operand("activation") == of_activation
    assert spec.operand("activation_gradient") == of_gradient
    assert spec.operand("weight_gradient") == of_gradient


def test_options_of_an_operand_come_first() -> None:
    options = {
        "format": "E3M4",
        "granularity": "channel",
        "policy": "dynamic",
        "rounding": "stochastic",
        "ste": "relu",
    }
    gradient = {"activation": options | {"ste": None}}
    spec = LayerSpec("E4M3", options, "tensor", "static", gradient=gradient)
    of_gradient = OperandSpec("E3M4", "channel", "dynamic", None, "stochastic")
    of_activation = OperandSpec("E3M4", "channel", "dynamic", None, "stochastic", ste="relu")
    assert spec.operand("activation") == of_activation
    assert spec.operand("activation_gradient") == of_gradient
    assert spec.operand("weight").policy == "static"


def test_a_history_is_sixteen_unless_told_otherwise() -> None:
    assert LayerSpec("E4M3", policy="delayed").operand("weight").history == 16
    spec = LayerSpec({"format": "E4M3", "policy": "delayed", "history": 100}, activation="E4M3")
    assert spec.operand("weight").history == 100
    assert spec.operand("activation").history is None


def test_a_given_scale_has_no_policy() -> None:
    spec = LayerSpec(
        {"format": "E4M3", "scale": 2},
        gradient={"format": "E5M2", "scale": "global"},
        policy="static",
    )
    of_weight = OperandSpec("E4M3", "tensor", None, None, "nearest", 2.0, "identity")
    of_gradient = OperandSpec("E5M2", "tensor", None, None, "nearest", "global")
    assert spec.operand("weight") == of_weight
    assert spec.operand("weight_gradient") == of_gradient
