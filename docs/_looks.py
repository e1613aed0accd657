"""Looks that figures share: colours, line styles and matplotlib's settings."""

from typing import Any

# Okabe and Ito's colours can be told apart with every common colour blindness. Each
# format also has its own line style.
LOOKS: dict[str, dict[str, Any]] = {
    "E1M6": {"color": "#555555", "linestyle": (0, (1, 1.2))},
    "E3M4": {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1))},
    "E4M3": {"color": "#0072B2", "linestyle": "-"},
    "E5M2": {"color": "#009E73", "linestyle": (0, (6, 2))},
    "E7M0": {"color": "#D55E00", "linestyle": (0, (3, 1.2))},
}
NEAREST = "#D55E00"
STOCHASTIC = "#0072B2"
EXACT = "#222222"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "fp8manifold",
    "svg.fonttype": "path",
}
