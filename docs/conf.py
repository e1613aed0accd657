"""Sphinx's configuration.

Tables and figures are committed. `_generated.py` makes them, and a build uses them.
"""

import inspect
import re
import sys
import warnings
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATED = HERE / "generated"
sys.path.insert(0, str(HERE))

import _inventories  # noqa: E402

# geoopt scripts its helpers at import, which its users cannot change.
warnings.filterwarnings("ignore", message="`torch.jit.script`")

project = "fp8manifold"
author = "the fp8manifold authors"
project_copyright = "the fp8manifold authors"
release = version = installed_version("fp8manifold")

extensions = [
    "_elsewhere",
    "_mathml",
    "_plain",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "generated", "examples/GALLERY_HEADER.rst"]
# The gallery's settings hold objects, which Sphinx cannot cache.
suppress_warnings = ["config.cache"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# A decorator may complete a signature, which then has more defaults than its source.
autodoc_preserve_defaults = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# A reference without a target is a warning. Not so for names of other projects: those
# that an inventory has become links, but the build must pass without a network too.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|geoopt|fractions|collections\.abc|typing|optional|nn|Any|Tensor)(\..*)?"),
    (r"py:.*", r"(float|int|str|bool|None|dict|list|tuple|object|cached_property|NoneType)"),
    (r"py:.*", r"(TypeError|ValueError|FloatingPointError|UserWarning)"),
    (r"py:.*", r"(Callable|Mapping|Sequence|Iterable|Literal)"),
    # documented in the text of its class
    (r"py:data", r"LAYOUTS"),
    # aliases, which autodoc shows by name but does not document
    (
        r"py:.*",
        r"(fp8manifold\.[\w.]+\.)?"
        r"(FormatLike|Formats|Rounding|WriteRounding|Overflow|Metric|Granularity|Policy|STE"
        r"|Schedule|Parameters|ScaleLike|Storage|StoredWeight|TrainerOptimizer|BackwardPass"
        r"|TensorMetadata|Shard|ServedLayout)",
    ),
]

_inventories.write_inventories(GENERATED)
intersphinx_mapping = _inventories.intersphinx_mapping(GENERATED)
intersphinx_timeout = 5
intersphinx_disabled_reftypes = ["std:*"]

# pytest runs the examples in docstrings; Sphinx does not.
doctest_test_doctest_blocks = ""
doctest_global_setup = (
    "import warnings\nwarnings.filterwarnings('ignore', message='`torch.jit.script`')"
)

# Examples are not run: what they print is in their docstrings, where a test keeps it.
sphinx_gallery_conf = {
    "examples_dirs": ["../examples"],
    "gallery_dirs": ["examples"],
    "plot_gallery": False,
    "download_all_examples": False,
    "write_computation_times": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "reset_modules": (),
    "capture_repr": (),
}

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "fp8manifold"
html_static_path = ["_static"]
html_css_files = ["figures.css"]
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _join_names(
    _app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Join a list of argument names that is broken after a comma.

    Napoleon needs it on one line.
    """
    broken_list = r"^( {4}(?:\w+, )*\w+,)\n +((?:\w+, )*\w+: )"
    text = re.sub(broken_list, r"\1 \2", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.split("\n")


def _keep_property(
    _app: Any, what: str, _name: str, obj: Any, _options: Any, lines: list[str]
) -> None:
    """Restore a property's docstring, which napoleon splits as `TYPE: DESCRIPTION`."""
    if what == "property":
        lines[:] = [*(inspect.getdoc(obj) or "").splitlines(), ""]


def setup(app: Any) -> dict[str, bool]:
    """Correct docstrings before and after napoleon (priority 500)."""
    app.connect("autodoc-process-docstring", _join_names, priority=400)
    app.connect("autodoc-process-docstring", _keep_property, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
