"""OperandSpec and LayerSpec: what they read, what stands for what is left out, and what they refuse."""

from fp8manifold import LayerSpec, OperandSpec

BACKWARD = ("activation_gradient", "weight_gradient")


def test_a_format_is_short_for_an_operand() -> None:
    assert LayerSpec("E4M3").weight == LayerSpec({"format": "e4m3"}).weight == OperandSpec("E4M3")
    assert LayerSpec({"format": "none"}) == LayerSpec()


def test_one_gradient_is_both() -> None:
    for gradient in ("E5M2", {"format": "E5M2"}, OperandSpec("E5M2")):
        spec = LayerSpec(gradient=gradient)
        assert spec.activation_gradient == spec.weight_gradient == OperandSpec("E5M2")
    only = LayerSpec(gradient={"weight": {"format": "E5M2", "rounding": "stochastic"}})
    assert only.activation_gradient is None
    assert only.weight_gradient == OperandSpec("E5M2", rounding="stochastic")
    assert LayerSpec(gradient={"activation": "none", "weight": None}).quantizes_nothing


def test_what_an_operand_leaves_out_is_the_layers() -> None:
    spec = LayerSpec("E4M3", "E4M3", "block", "delayed", "clipped", gradient="E5M2", rounding="split", history=20)
    weight, activation = spec.operand("weight"), spec.operand("activation")
    assert weight == OperandSpec("E4M3", "block", "delayed", 20, "nearest", ste="clipped")
    assert activation == OperandSpec("E4M3", "tensor", "delayed", 20, "nearest", ste="clipped")
    for name in BACKWARD:
        assert spec.operand(name) == OperandSpec("E5M2", "tensor", "delayed", 20, "stochastic")  # type: ignore[arg-type]


def test_an_operands_own_options_come_first() -> None:
    own = {"format": "E3M4", "granularity": "channel", "policy": "dynamic", "rounding": "stochastic", "ste": "relu"}
    spec = LayerSpec("E4M3", own, "tensor", "static", gradient={"activation": own | {"ste": None}})
    assert spec.operand("activation") == OperandSpec("E3M4", "channel", "dynamic", None, "stochastic", ste="relu")
    assert spec.operand("activation_gradient") == OperandSpec("E3M4", "channel", "dynamic", None, "stochastic")
    assert spec.operand("weight").policy == "static"  # type: ignore[union-attr]


def test_a_history_is_sixteen_unless_told_otherwise() -> None:
    assert LayerSpec("E4M3", policy="delayed").operand("weight").history == 16  # type: ignore[union-attr]
    spec = LayerSpec({"format": "E4M3", "policy": "delayed", "history": 100}, activation="E4M3")
    assert spec.operand("weight").history == 100  # type: ignore[union-attr]
    assert spec.operand("activation").history is None  # type: ignore[union-attr]


def test_a_scale_that_is_given_leaves_no_policy() -> None:
    spec = LayerSpec({"format": "E4M3", "scale": 2}, gradient={"format": "E5M2", "scale": "global"}, policy="static")
    assert spec.operand("weight") == OperandSpec("E4M3", "tensor", None, None, "nearest", 2.0, "identity")
    assert spec.operand("weight_gradient") == OperandSpec("E5M2", "tensor", None, None, "nearest", "global")
