"""Whatever is written into a file is taken, or refused in one line.

Configurations, sweep files, a format's name, a checkpoint's outline. Nothing else comes
out, and nothing hangs.
"""

import copy
import math
import random
import signal
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import fp8manifold as fm
from nanogpt_bench.checkpoint.format import capture_tree, restore_tree
from nanogpt_bench.config.keys import FIELDS, SECTIONS
from nanogpt_bench.config.rules import RULES
from nanogpt_bench.config.settings import CONFIGS_FOLDER, load_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep import file as sweep_file
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import count_points, plan_sweep
from nanogpt_bench.system.errors import BenchError

#: of a core; the slowest input that is refused takes a tenth of it
MOST_SECONDS = 20.0
#: of a sweep that is planned to its end, which takes a tenth of a second a run
MOST_PLANNED = 2
LONGEST_MESSAGE = 5000


@contextmanager
def at_most(seconds):
    """End the block by an error after so many seconds of a core."""

    def stop(*_):
        raise TimeoutError(f"more than {seconds:g} s of a core")

    old_handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old_handler)


def is_taken(parse, kind=BenchError):
    try:
        with at_most(MOST_SECONDS):
            parse()
    except kind as error:
        message = str(error)
        assert message, "an error without a word"
        assert message.isprintable(), (
            f"an error of more than one line, or of what a terminal obeys: {message!r}"
        )
        assert len(message) <= LONGEST_MESSAGE, (
            f"an error of {len(message):,} characters: {message[:200]!r}"
        )
        return False
    return True


def config(path, arguments):
    settings = load_config(path, arguments)
    settings.model.init_from = None
    resolve(settings)


def sweep(path, arguments):
    plan = read_sweep(path, [*arguments, "--model.init_from=null"])
    if count_points(plan) <= MOST_PLANNED:
        plan_sweep(plan)


def format_name(name):
    fmt = fm.FloatFormat.from_string(name)
    assert fm.FloatFormat.from_string(fmt.name) == fmt
    assert math.isfinite(fmt.max)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
CONTROL = st.sampled_from(
    ["\x1b[2J", "\x00", "\x85", "\u2028", "\u202e", "\ud800", "\r", "\n", "\x7f", "\ufeff"]
)
CHOICES = set()
for setting in FIELDS.values():
    CHOICES.update(setting.facts["choices"] or ())
FORMATS = ("E4M3", "e7m0", "E3M4IEEE", "E9M9", "none")
WORDS = st.sampled_from(
    [*sorted(CHOICES), *RULES, *FORMATS, "*", "attn", "weight", "off", "nan", "null", "../x"]
)
NUMBERS = (
    st.integers(-2, 10**6) | st.sampled_from([10**399, -(2**70), 1e308, -0.0, 5e-324]) | st.floats()
)
LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | WORDS
    | ANY_TEXT
    | st.binary(max_size=8)
    | st.dates()
    | st.datetimes()
)
KEYS = st.sampled_from(
    [*FIELDS, *sorted(SECTIONS), "model.formats.attn", "alerts.at_most.x", "failure.x"]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | ANY_TEXT | NUMBERS, inner, max_size=3)
        | st.sets(st.integers(0, 3), max_size=2)
    ),
    max_leaves=5,
)


def values_of(key):
    """Values that a setting may have, more or less, and now and then any other."""
    setting = FIELDS[key]
    if key == "rule" or setting.facts["choices"]:
        known = st.sampled_from(sorted(RULES) if key == "rule" else setting.facts["choices"])
    elif "format" in key:
        known = st.sampled_from(FORMATS)
    else:
        known = (
            st.integers(1, 9)
            if setting.kind is int
            else st.just(setting.default) | st.sampled_from([0.25, 1, 2.5])
        )
    if key == "model.formats":
        known = st.dictionaries(
            st.sampled_from(["*", "attn", "blocks.0"]) | ANY_TEXT, known | LAYERS, max_size=2
        )
    return st.one_of(known, known, known, known, known, VALUES)


LAYERS = st.dictionaries(
    st.sampled_from(
        [
            "weight",
            "activation",
            "gradient",
            "granularity",
            "policy",
            "history",
            "rounding",
            "ste",
            "x",
        ]
    ),
    st.sampled_from([*FORMATS, "tensor", "dynamic", "delayed", "split", "clipped", 16]) | VALUES,
    max_size=3,
)
PAIRS = st.sampled_from(sorted(FIELDS)).flatmap(lambda key: st.tuples(st.just(key), values_of(key)))
SETTINGS = st.lists(PAIRS, max_size=5).map(dict) | st.dictionaries(
    KEYS | ANY_TEXT | st.integers(0, 3), VALUES, max_size=4
)
RANGES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("min", "max"), NUMBERS | LEAVES),
        "scale": st.sampled_from(["log", "linear"]) | LEAVES,
        "points": st.integers(1, 5) | st.just(10**15) | LEAVES,
    },
)
CALM = sorted(
    key for key in FIELDS if key.startswith(("eval.", "checkpoint.", "train.max")) or key == "seed"
)
CALM_AXES = st.sampled_from(CALM).flatmap(
    lambda key: st.dictionaries(
        st.just(key), st.lists(values_of(key), min_size=1, max_size=2), min_size=1
    )
)
AXIS = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda key: st.tuples(st.just(key), st.lists(values_of(key), min_size=1, max_size=2) | RANGES)
)
AXES = st.lists(AXIS, min_size=1, max_size=2).map(dict)
SWEEPS = st.fixed_dictionaries(
    {},
    optional={
        "config": WORDS | LEAVES | st.just("e4m3.yaml") | st.just("x" * 5000),
        "axes": AXES
        | CALM_AXES
        | st.dictionaries(KEYS | ANY_TEXT, st.lists(VALUES, max_size=3) | RANGES, max_size=2),
        "search": st.sampled_from(["grid", "random"]) | LEAVES,
        **dict.fromkeys(("samples", "sample_seed", "workers"), NUMBERS | LEAVES),
        **dict.fromkeys(("settings", "reference"), SETTINGS | VALUES),
        "sensitivity": st.dictionaries(
            st.sampled_from(["patterns", "blocks", "operand"]), VALUES, max_size=2
        ),
    },
)
#: what means something in YAML, or breaks it
MARKS = r"""
:  -  { } [ ] , &a *a ' " | > # ? = 0x - 0 9 null true 1e999 .inf 1:1 --- ... !!float !!set !!binary !!timestamp !!int
!!python/object:os.x %YAML
"""
FRAGMENTS = st.sampled_from(MARKS.split()).map(lambda mark: f"{mark} ") | st.sampled_from(
    ["\n", "\t", "<<: *a", "|\n"]
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 20), FRAGMENTS | CONTROL | ANY_TEXT),
    min_size=1,
    max_size=4,
)


def as_yaml(content):
    """Return a file that holds some content.

    What YAML has no word for is left to its own escapes.
    """
    return yaml.safe_dump(content, allow_unicode=True).encode("utf-8", errors="surrogatepass")


def edited(text, edits):
    """A text with stretches of it replaced.

    Where each begins as a share, how long it is, and what takes its place.
    """
    for share, length, new in edits:
        start = int(share * len(text))
        text = text[:start] + new + text[start + length :]
    return text.encode("utf-8", errors="surrogatepass")


def edited_files(folder):
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml"))]
    return st.builds(edited, st.sampled_from(texts), EDITS)


ANY_FILES = VALUES.map(as_yaml) | st.binary(max_size=200)
CONFIG_FILES = SETTINGS.map(as_yaml) | edited_files(CONFIGS_FOLDER) | ANY_FILES
CALM_SWEEPS = st.builds(
    lambda axes, settings, is_alone: {"axes": axes} | ({} if is_alone else settings),
    CALM_AXES,
    SWEEPS,
    st.booleans(),
)
SWEEP_FILES = (
    CALM_SWEEPS.map(as_yaml)
    | SWEEPS.map(as_yaml)
    | edited_files(sweep_file.SWEEPS_FOLDER)
    | ANY_FILES
)
OVERRIDES = st.lists(
    PAIRS.map(lambda pair: f"--{pair[0]}={pair[1]}")
    | st.builds(
        "--{}{}{}".format,
        KEYS | ANY_TEXT | st.builds("model.formats.{}".format, ANY_TEXT),
        st.sampled_from(["=", "=", "=", ""]),
        WORDS | ANY_TEXT | NUMBERS.map(str) | VALUES.map(repr) | st.just("[" * 99) | CONTROL,
    )
    | ANY_TEXT,
    max_size=3,
)
NAMES = (
    st.from_regex(
        r"(?i)e[0-9]m[0-9](fnuz|fn|ieee|finite|p3109[ef])?(_b-?[0-9]{1,3})?", fullmatch=True
    )
    | st.from_regex(r"(?i)p3109_[0-9]p[0-9]{1,2}f?", fullmatch=True)
    | ANY_TEXT
    | st.integers(0, 5000).map(lambda n: f"E{'9' * n}M1")
    | st.integers(0, 5000).map(lambda n: f"E4M3_B{'9' * n}")
    | st.sampled_from(
        ["E\uff14M\uff13", "E\u00b2M1", "\u017f", "E4M3\n", "\x00E4M3", "e4m3\ufb01nite"]
    )
)


@pytest.fixture
def tried(request, tally):
    """Counts what a test tries; both outcomes must occur, lest it try one thing only."""
    outcomes = []
    yield outcomes.append
    tally(
        f"fuzzed: {request.node.name}",
        len(outcomes),
        f"{sum(outcomes):,} taken, the others refused in one line",
    )
    assert 0 < sum(outcomes) < len(outcomes)


def fuzz(inputs, once, examples, full):
    """Try a number of inputs, fifty times as many in the full tier."""
    limits = settings(
        max_examples=examples * (50 if full else 1),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    limits(seed(random.randrange(2**32) if full else 5)(given(inputs)(once)))()


@pytest.mark.parametrize(
    ("parse", "inputs", "examples"),
    [
        pytest.param(config, st.tuples(CONFIG_FILES, st.just([])), 100, id="config files"),
        pytest.param(
            config, st.tuples(CONFIG_FILES, OVERRIDES), 20, id="config files with overrides"
        ),
        pytest.param(config, st.tuples(st.just(b"{}"), OVERRIDES), 100, id="overrides"),
        pytest.param(sweep, st.tuples(SWEEP_FILES, st.just([]) | OVERRIDES), 120, id="sweep files"),
    ],
)
def test_a_file_is_taken_or_refused_in_one_line(parse, inputs, examples, tried, tmp_path, full):
    def once(draw):
        (tmp_path / "x.yaml").write_bytes(draw[0])
        tried(is_taken(partial(parse, tmp_path / "x.yaml", draw[1])))

    fuzz(inputs, once, examples, full)


def test_a_format_name_is_read_or_refused_in_one_line(tried, full):
    fuzz(NAMES, lambda name: tried(is_taken(partial(format_name, name), ValueError)), 500, full)


def whole_tree():
    weight = fm.FP8Tensor(torch.linspace(-1, 1, 64).view(2, 32), "E4M3", granularity="block")
    state = {
        0: {"step": torch.tensor(3.0), "moment": weight},
        (1, "a"): [torch.ones(2), -0.0, float("nan"), 2**70],
    }
    return {
        "state": state,
        "dtype": torch.bfloat16,
        "text": "a\u2028",
        "none": None,
        "pair": (True, []),
    }


NODES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ANY_TEXT
    | st.sampled_from(["state/0/step", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, item: {kind: item},
            st.sampled_from(["dict", "tuple", "float", "dtype", "tensor", "class", "x"]),
            inner,
        )
    ),
    max_leaves=5,
)


def places(outline, values):
    keys = []
    if isinstance(outline, dict):
        keys = list(outline)
    elif isinstance(outline, list):
        keys = range(len(outline))
    for key in keys:
        values.append((outline, key))
        places(outline[key], values)
    return values


def test_a_changed_tree_is_restored_or_refused_in_one_line(tried, full):
    def once(data):
        tensors, outline = capture_tree(whole_tree())
        for _ in range(data.draw(st.integers(1, 3))):
            container, key = data.draw(st.sampled_from(places([outline], [])))
            other_nodes = st.sampled_from([tree[k] for tree, k in places([outline], [])])
            container[key] = copy.deepcopy(data.draw(NODES | other_nodes))
        tried(is_taken(lambda: restore_tree(tensors, outline, (fm.FP8Tensor,)), ValueError))

    fuzz(st.data(), once, 400, full)
