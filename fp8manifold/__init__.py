"""8-bit float formats as Riemannian manifolds, with optimizers for weights on their grids."""

# _shards registers the operators of sharded weights, and _doors.trainers lets trainers
# resume from saved folders: nothing else imports them.
from fp8manifold import _shards, distributed, files, huggingface, ops, optim, reference  # noqa: F401
from fp8manifold._doors import trainers as _trainers  # noqa: F401
from fp8manifold._doors.load import load
from fp8manifold._doors.save import save
from fp8manifold._geoopt_import import follow_geoopt
from fp8manifold._memory import MemoryNeeded, memory_needed
from fp8manifold._native import NativeUnavailableWarning
from fp8manifold._served.apply import apply_changes
from fp8manifold._served.changes import ServedChanges
from fp8manifold._served.patch import Patch
from fp8manifold._served.patch_files import read_changes, write_changes
from fp8manifold._served.weights import ServedWeights, served_weights
from fp8manifold.averages import averaged_model
from fp8manifold.fake_quant import fake_quantize
from fp8manifold.formats import NAMED_FORMATS, FloatFormat
from fp8manifold.grid import decode, encode, from_chart, round_to_grid, to_chart, ulp
from fp8manifold.lost_updates import ReportedUpdate, UpdateReport, lost_updates
from fp8manifold.manifolds import FP8Manifold, StiffnessManifold
from fp8manifold.nn import QuantizedLinear
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
    "MemoryNeeded",
    "NativeUnavailableWarning",
    "OperandSpec",
    "Patch",
    "QuantizationReport",
    "QuantizedLinear",
    "RepeatedRoundingWarning",
    "ReportedLayer",
    "ReportedUpdate",
    "SaturationWarning",
    "Scale",
    "ServedChanges",
    "ServedWeights",
    "StiffnessManifold",
    "UnderflowWarning",
    "UpdateReport",
    "amax_scale",
    "apply_changes",
    "averaged_model",
    "decode",
    "dequantize_model",
    "distributed",
    "encode",
    "fake_quantize",
    "files",
    "from_chart",
    "huggingface",
    "load",
    "lost_updates",
    "memory_needed",
    "ops",
    "optim",
    "quantization_report",
    "quantize_model",
    "quantize_weight_gradients",
    "random_bits",
    "read_changes",
    "reference",
    "round_to_grid",
    "save",
    "served_weights",
    "storage_scale",
    "to_chart",
    "ulp",
    "widened_scale",
    "write_changes",
]
