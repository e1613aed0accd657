"""8-bit float formats as Riemannian manifolds, with optimizers for weights on their grids."""

# _shards registers the operators of sharded weights, and _doors.trainers lets trainers
# resume from saved folders: nothing else imports them.
from fp8manifold import _shards, distributed, huggingface, ops, optim, reference  # noqa: F401
from fp8manifold._doors import trainers as _trainers  # noqa: F401
from fp8manifold._doors.load import load
from fp8manifold._doors.save import save
from fp8manifold._geoopt_import import follow_geoopt
from fp8manifold._native import NativeUnavailableWarning
from fp8manifold.averages import averaged_model
from fp8manifold.checkpoints import load_fp8, published_weights, save_fp8
from fp8manifold.exchange import export_model, exported_state_dict
from fp8manifold.fake_quant import fake_quantize
from fp8manifold.formats import NAMED_FORMATS, FloatFormat
from fp8manifold.grid import decode, encode, from_chart, round_to_grid, to_chart, ulp
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.nn import QuantizedLinear
from fp8manifold.nn._loading import load_quantized
from fp8manifold.nn._parts import unflatten_state_dict
from fp8manifold.nn._plan import check_formats
from fp8manifold.nn._scalers import Scale
from fp8manifold.nn._spec import LayerSpec, OperandSpec
from fp8manifold.nn._surgery import (
    QuantizationReport,
    ReportedLayer,
    dequantize_model,
    quantization_report,
    quantize_model,
    quantize_weight_gradients,
)
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import random_bits
from fp8manifold.scaling import (
    RepeatedRoundingWarning,
    SaturationWarning,
    UnderflowWarning,
    amax_scale,
    storage_scale,
    widened_scale,
)
from fp8manifold.tensor import FP8Tensor

__version__ = "0.1.0"

# after all classes that inherit from geoopt's
follow_geoopt()
del follow_geoopt

__all__ = [
    "NAMED_FORMATS",
    "FP8Manifold",
    "FP8Parameter",
    "FP8Tensor",
    "FloatFormat",
    "LayerSpec",
    "NativeUnavailableWarning",
    "OperandSpec",
    "QuantizationReport",
    "QuantizedLinear",
    "RepeatedRoundingWarning",
    "ReportedLayer",
    "SaturationWarning",
    "Scale",
    "StiffnessManifold",
    "UnderflowWarning",
    "amax_scale",
    "averaged_model",
    "check_formats",
    "decode",
    "dequantize_model",
    "distributed",
    "encode",
    "export_model",
    "exported_state_dict",
    "fake_quantize",
    "from_chart",
    "huggingface",
    "load",
    "load_fp8",
    "load_quantized",
    "ops",
    "optim",
    "published_weights",
    "quantization_report",
    "quantize_model",
    "quantize_weight_gradients",
    "random_bits",
    "reference",
    "round_to_grid",
    "save",
    "save_fp8",
    "storage_scale",
    "to_chart",
    "ulp",
    "unflatten_state_dict",
    "widened_scale",
]
