"""What a run can watch: small pure functions of tensors, and two that remember earlier ones."""

from fp8manifold.monitor.attention import attention_entropy
from fp8manifold.monitor.bits import BitFigures, bit_figures, code_histogram, gap_lengths
from fp8manifold.monitor.geometry import (
    GeometryFigures,
    PathTracker,
    WarpFigures,
    chart_distance,
    geometry_figures,
    metric_min_eigenvalue,
    orthogonality,
    warp_figures,
)
from fp8manifold.monitor.gradients import (
    DeadRuns,
    GradientFigures,
    ShadowFigures,
    gradient_figures,
    shadow_figures,
    update_to_noise,
    zero_gradient_zone,
)
from fp8manifold.monitor.histogram import Histogram, magnitude_histogram, residual_histogram, stiffness_histogram
from fp8manifold.monitor.ranges import RangeFigures, range_figures, scale_changes
from fp8manifold.monitor.stall import (
    Arrival,
    StallFigures,
    code_drift,
    code_unchanged,
    residual_saturation,
    stall_figures,
    update_arrived,
    update_lost,
)

__all__ = [
    "Arrival",
    "BitFigures",
    "DeadRuns",
    "GeometryFigures",
    "GradientFigures",
    "Histogram",
    "PathTracker",
    "RangeFigures",
    "ShadowFigures",
    "StallFigures",
    "WarpFigures",
    "attention_entropy",
    "bit_figures",
    "chart_distance",
    "code_drift",
    "code_histogram",
    "code_unchanged",
    "gap_lengths",
    "geometry_figures",
    "gradient_figures",
    "magnitude_histogram",
    "metric_min_eigenvalue",
    "orthogonality",
    "range_figures",
    "residual_histogram",
    "residual_saturation",
    "scale_changes",
    "shadow_figures",
    "stall_figures",
    "stiffness_histogram",
    "update_arrived",
    "update_lost",
    "update_to_noise",
    "warp_figures",
    "zero_gradient_zone",
]
