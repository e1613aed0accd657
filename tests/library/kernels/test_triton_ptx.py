"""PTX that Triton compiles for GPUs that are not here.

It has no contraction, no approximation, no spills, and wide loads. It is compiled ahead
of time for sm_80, sm_90 and sm_100, without a driver, and for sm_89 what makes operands
for its units. What a weight costs is recorded and held to 5%.
"""

import functools
import importlib.metadata
import importlib.util
import json
import operator
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fp8manifold import _triton
from fp8manifold._triton import launch, whole
from fp8manifold._triton.kinds import (
    Statistics,
    Tile,
    TileScales,
    as_constants,
    format_of,
    widening_of,
)
from fp8manifold.formats import as_format
from fp8manifold.optim._factors import Preconditioner
from fp8manifold.optim._spec import spec_of
from fp8manifold.optim._triton_step import kernel_spec

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="Triton brings ptxas for Linux only"
    ),
]

ARCHITECTURES = (80, 90, 100)
RECORD, RECORDED_BY = Path(__file__).with_name("triton_costs.json"), "3.8."
THREADS, ELEMENTS = 128, 2048
#: sizes that 16 divides
WIDE = ("length", "numel", "height", "width", "stride")
#: by name: write-back, moments, tile
STEPS = {
    "stochastic, 8-bit moments": ("stochastic", "8bit", Tile(8, 256, 256, TileScales.ROW, True)),
    "residual8, 8-bit moments": ("residual8", "8bit", Tile(8, 256, 256, TileScales.ROW, True)),
    "nearest, 8-bit moments": ("nearest", "8bit", Tile(8, 256, 256, TileScales.ROW, True)),
    "stochastic, float32 moments": (
        "stochastic",
        "float32",
        Tile(8, 256, 256, TileScales.ROW, True),
    ),
    "stochastic, bfloat16 moments": (
        "stochastic",
        "bfloat16",
        Tile(1, 2048, 0, TileScales.ONE, True),
    ),
}
CODES = {"direction": "adam", "storage": "codes", "decays": True}
VARIANTS = {
    "plain bfloat16": {
        "direction": "adam",
        "storage": "plain",
        "writeback": "stochastic",
        "weight": torch.bfloat16,
    },
    "lion": {
        "direction": "lion",
        "storage": "codes",
        "writeback": "residual8",
        "stiffness": "linear",
    },
    "riemannian": {
        "direction": "adam",
        "storage": "codes",
        "geometry": "exponential",
        "writeback": "momentum",
    },
    "tangent": {
        "direction": "sgd",
        "storage": "grid",
        "geometry": "tangent",
        "scale_is_power_of_two": False,
    },
    "power": {
        "direction": "adam",
        "storage": "codes",
        "stiffness": "power",
        "writeback": "stochastic",
    },
    "free": {"direction": "sgd", "storage": "free", "has_moments": False, "weight": torch.float16},
    "muon": {"direction": "muon", "storage": "plain", "nesterov": True, "moments": "8bit"},
    "adafactor": {
        "direction": "sgd",
        "storage": "codes",
        "has_moments": False,
        "preconditioner": Preconditioner.FACTORED,
        "writeback": "stochastic",
    },
    # rows that no block divides, and scales of blocks
    "long": CODES
    | {
        "writeback": "stochastic",
        "moments": "8bit",
        "tile": Tile(1, 1024, 0, TileScales.ROW, False, True),
    },
    "runs": CODES
    | {
        "writeback": "stochastic",
        "moments": "float32",
        "tile": Tile(1, 2048, 0, TileScales.RUN, False),
    },
    "short rows": CODES
    | {
        "writeback": "residual8",
        "moments": "8bit",
        "tile": Tile(16, 128, 77, TileScales.ROW, False),
    },
    "blocks": CODES
    | {
        "writeback": "stochastic",
        "moments": "8bit",
        "tile": Tile(64, 32, 32, TileScales.ROW, True),
    },
}


@dataclass(frozen=True)
class Built:
    ptx: str
    sass: str
    usage: str

    @property
    def registers(self):
        return int(re.search(r"REG:(\d+)", self.usage)[1])

    @property
    def instructions(self):
        """A weight: those of the function, over what a thread takes."""
        lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*)$", self.sass, re.MULTILINE)
        return sum("NOP" not in line for line in lines) * THREADS / ELEMENTS


def build(kernel, signature, constants, architecture, tmp, warps=4):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else signature[name] for name in names}
    wide = [i for i, name in enumerate(names) if kinds[name][0] == "*" or name in WIDE]
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): as_constants(value) for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in wide},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options=_triton.options() | {"num_warps": warps},
    )
    (tmp / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    listings = [
        subprocess.run(
            [tools / tool, *flags, tmp / "kernel.cubin"], capture_output=True, text=True, check=True
        ).stdout
        for tool, *flags in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
    ]
    return Built(compiled.asm["ptx"], *listings)


def step(spec, tile, architecture, tmp):
    from fp8manifold._triton.step import step_kernel

    pointers = {"table": "*i32", "chunks": "*i32", "report": "*i32"}
    return build(step_kernel, pointers, {"SPEC": spec, "TILE": tile}, architecture, tmp)


def spec(writeback, moments):
    options = {"direction": "adam", "storage": "codes", "fmt": as_format("E4M3"), "decays": True}
    return kernel_spec(
        spec_of(writeback=writeback, moments=moments, **options), torch.uint8, torch.float32
    )


def faults(built, stack=0):
    """The instructions that a kernel with the bits of native code must not have.

    Of the stack a thread may use so many bytes.
    """
    for name, pattern in {
        "contraction": r"\bfma\.",
        "flushed subnormals": r"\.ftz",
        "approximation": r"\.approx|div\.full|\.lg2|\.ex2",
        "roots that are not rounded": r"sqrt\.(?!rn)",
        "quotients that are not rounded": r"div\.(?!rn|s32|u32|s64|u64)",
        "float64": r"\.f64",
    }.items():
        if re.search(pattern, built.ptx):
            yield name
    usage = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", built.usage)
    used, local = map(int, usage.groups())
    if used > stack or local or (used == 0 and re.search(r"\b(LDL|STL)", built.sass)):
        yield "spills"


def wide(way, built):
    """The number of loads (ld) or stores (st) of 16 bytes."""
    return len(re.findall(rf"{way}\.global\S*\.v4\.b32", built.ptx))


def narrow(built):
    """Return the narrow loads and stores of arrays.

    Words of a record, a row's scale, its bounds and a flag have 32 or 64 bits.
    """
    moved = re.findall(r"\b(?:ld|st)\.global(?:\.\w+)*?\.(v\d\.)?(b\d+)", built.ptx)
    return [f"{vector}{width}" for vector, width in moved if int(width[1:]) < 32 or vector == "v2."]


def costs_as_recorded(built, *names):
    """Hold instructions and registers to 5% of the record; return whether they could be.

    They can be under the release of Triton that the record is of.
    """
    if not importlib.metadata.version("triton").startswith(RECORDED_BY):
        return False
    recorded = functools.reduce(
        operator.getitem, names, json.loads(RECORD.read_text(encoding="utf-8"))
    )
    assert built.instructions == pytest.approx(recorded["instructions"], rel=0.05)
    assert built.registers == pytest.approx(recorded["registers"], rel=0.05)
    return True


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_codes(name, architecture, tmp_path):
    writeback, moments, tile = STEPS[name]
    built = step(spec(writeback, moments), tile, architecture, tmp_path)
    assert list(faults(built)) == []
    assert narrow(built) == []
    bytes_a_weight = {"8bit": 1, "bfloat16": 2, "float32": 4}[moments]
    loads = 1 + 4 + 2 * bytes_a_weight + (writeback == "residual8")
    # A thread takes 16 elements: of arrays of bytes these are 16 bytes.
    assert (wide("ld", built), wide("st", built)) == (loads, loads - 4)
    if costs_as_recorded(built, f"sm_{architecture}", name):
        # keeping -0 beside a residual holds the old codes until they are written: a
        # block fewer at a time
        assert built.registers <= (184 if name == "residual8, 8-bit moments" else 168)


#: For sm_100 the compiler keeps to 168 or 128 registers here, so that more threads run at
#: a time, and puts one number of 64 bits on the stack. No such card was at hand to say what
#: that costs.
STACK_OF_RARE_KERNELS = {100: 8}


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_other_steps(name, architecture, tmp_path):
    fields = dict(VARIANTS[name])
    weight = fields.pop("weight", torch.uint8 if fields["storage"] == "codes" else torch.float32)
    fmt = None if fields["storage"] == "plain" else as_format("E4M3")
    tile = fields.pop("tile", None)
    known = replace(
        kernel_spec(spec_of(fmt=fmt, **fields), weight, torch.bfloat16), exponents=name == "blocks"
    )
    tile = tile or (
        Tile(8, 256, 256, TileScales.ROW, True)
        if known.blocks
        else Tile(1, 2048, 0, TileScales.ONE, True)
    )
    stack = STACK_OF_RARE_KERNELS.get(architecture, 0)
    assert list(faults(step(known, tile, architecture, tmp_path), stack)) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["decode", "round", "encode", "finite"])
def test_whole_arrays(kernel, architecture, tmp_path):
    from fp8manifold._triton import arrays

    fmt = format_of(as_format("E4M3"))
    sizes = {
        "rows": "i32",
        "length": "i32",
        "in_row": "i32",
        "numel": "i32",
        "keys": "*u32",
        "x": "*fp32",
    }
    signature = sizes | {
        "codes": "*u8",
        "scale": "*fp32",
        "table": "*i32",
        "chunks": "*i32",
        "report": "*i32",
    }
    signature["out"] = {"decode": "*u16", "round": "*fp32", "encode": "*u8", "finite": "*i32"}[
        kernel
    ]
    constants = {
        "decode": {"FORMAT": fmt, "R": 1, "W": 2048},
        "round": {
            "FORMAT": fmt,
            "STOCHASTIC": True,
            "SCALED": True,
            "RESCALE": True,
            "R": 1,
            "W": 2048,
        },
        "encode": {
            "FORMAT": fmt,
            "STOCHASTIC": True,
            "FIXED": True,
            "SCALED": True,
            "R": 1,
            "W": 2048,
        },
        "finite": {"KIND": "bfloat16", "W": 2048},
    }
    built = build(
        getattr(arrays, f"{kernel}_kernel"), signature, constants[kernel], architecture, tmp_path
    )
    assert list(faults(built)) == []
    if kernel == "decode":
        assert (wide("ld", built), wide("st", built)) == (1, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "bits", "exponents"), [("E4M3", 0, False), ("E5M2", 8, True), ("E4M3FNUZ", 8, True)]
)
def test_scales_that_double(name, bits, exponents, architecture, tmp_path):
    from fp8manifold._triton.step import widen_kernel

    widening = widening_of(
        as_format(name), bits, exponents, "float32", "8bit" if exponents else "float32"
    )
    pointers = {"table": "*i32", "chunks": "*i32", "report": "*i32"}
    constants = {"SPEC": widening, "TILE": launch._tile_of_rows(widening)}
    built = build(widen_kernel, pointers, constants, architecture, tmp_path)
    assert list(faults(built, STACK_OF_RARE_KERNELS.get(architecture, 0))) == []


#: kernels of Adafactor's statistics, and what they are compiled for
OF_ROWS = {
    "coded": True,
    "weight": "uint8",
    "gradient": "float32",
    "format": format_of(as_format("E4M3")),
    "exponents": False,
    "scales": TileScales.ROW,
    "neighbours": 0,
    "tile": 512,
    "run": 32,
    "aligned": True,
}
OF_BLOCKS = {"scales": TileScales.RUN, "neighbours": 32, "exponents": True, "gradient": "bfloat16"}
OF_FLOATS = {"coded": False, "weight": "bfloat16", "scales": TileScales.ONE, "gradient": "float16"}
PASSES = {
    "rows": OF_ROWS,
    "blocks": OF_ROWS | OF_BLOCKS,
    "floats": OF_ROWS | OF_FLOATS,
    "short rows": OF_ROWS | {"tile": 16, "aligned": False, "scales": TileScales.ELEMENT},
}
TOTALS = {"TILE": 512, "RUN": 32}
BETWEEN_PASSES = {
    "column": {"RUN": 32, **dict(zip(("J", "LANES"), launch._COLUMN_RUNS, strict=True))},
    "row": TOTALS | {"AVERAGES": True, **dict(zip(("J", "LANES"), launch._ROW_RUNS, strict=True))},
    "mean": TOTALS | {"J": launch._TOTAL_RUNS},
    "clip": TOTALS | {"J": launch._TOTAL_RUNS},
}


def built_statistics(name, constants, architecture, tmp, warps):
    from fp8manifold._triton import factors

    pointers = {"table": "*i32", "chunks": "*i32", "report": "*i32"}
    kernel = getattr(factors, f"{name}_kernel")
    return build(kernel, pointers, constants, architecture, tmp, warps)


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", ["square", "direction"])
def test_passes_of_statistics(name, kind, architecture, tmp_path):
    """Threads of one warp add up halves: there is no barrier, and no shared memory."""
    known = Statistics(**PASSES[kind])
    built = built_statistics(name, {"SPEC": known}, architecture, tmp_path, 1)
    assert list(faults(built)) == []
    assert not re.search(r"\b(ld|st)\.shared", built.ptx)
    assert "bar.sync" not in built.ptx
    # a thread has 16 elements of each of 4 rows
    bytes_of_gradients = {"float32": 4, "bfloat16": 2, "float16": 2}[known.gradient] * known.aligned
    assert wide("ld", built) >= 4 * bytes_of_gradients


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", BETWEEN_PASSES)
def test_statistics_between_passes(name, architecture, tmp_path):
    built = built_statistics(name, BETWEEN_PASSES[name], architecture, tmp_path, 4)
    assert list(faults(built)) == []


#: compute capabilities with products in 8 bits; a kernel, its input, what it is
#: compiled for, and bytes a value
WITH_UNITS = (89, 90, 100)
E4M3 = {"LARGEST": 0x43E00000, "FORMAT": None}
OPERANDS = {
    "rows": ("rows_kernel", "*u16", E4M3 | {"FOLDS": 0}, 3),
    "rows, times scales of columns": ("rows_kernel", "*u16", E4M3 | {"FOLDS": 2}, 3),
    "rows of float32": ("rows_kernel", "*fp32", E4M3 | {"FOLDS": 0}, 5),
    "rows, to INT8": (
        "rows_kernel",
        "*u16",
        {"LARGEST": 0x42FE0000, "FORMAT": None, "FOLDS": 0},
        3,
    ),
    "columns, the largest": ("amax_kernel", "*u16", {"FOLDS": 2}, 2),
    "columns": ("columns_kernel", "*u16", E4M3 | {"FOLDS": 2}, 3),
    "codes, transposed": ("copy_kernel", "*u8", {"INTEGERS": False, "TRANSPOSED": True}, 2),
    "E1M6 to INT8, transposed": ("copy_kernel", "*u8", {"INTEGERS": True, "TRANSPOSED": True}, 2),
}


@dataclass(frozen=True)
class BuiltOperand(Built):
    values: int

    @property
    def instructions(self):
        return super().instructions * ELEMENTS / THREADS / self.values


def operand(name, architecture, tmp, width=4096, **changed):
    from fp8manifold._triton import arrays

    kernel, kind, constants, _ = OPERANDS[name]
    signature = {
        "height": "i32",
        "width": "i32",
        "stride": "i32",
        "x": kind,
        "fold": "*fp32",
        "amax": "*i32",
    }
    signature |= {"scales": "*fp32", "codes": "*u8", "out": "*u8"}
    rows, columns, warps = whole._program(width) if kernel == "rows_kernel" else (*whole._TILE, 4)
    shape = (
        {"R": rows, "W": columns, "LONG": width > 16384}
        if kernel == "rows_kernel"
        else {"R": rows, "C": columns}
    )
    built = build(
        getattr(arrays, kernel), signature, constants | shape | changed, architecture, tmp, warps
    )
    return BuiltOperand(**vars(built), values=rows * columns // (32 * warps))


@pytest.mark.parametrize("architecture", WITH_UNITS)
@pytest.mark.parametrize("name", OPERANDS)
def test_operands(name, architecture, tmp_path):
    kernel, kind, constants, _ = OPERANDS[name]
    built = operand(name, architecture, tmp_path)
    assert list(faults(built)) == []
    assert narrow(built) == []
    assert wide("st", built) == (
        0 if kernel == "amax_kernel" else built.values // 16
    )  # 16 bytes at once
    assert wide("ld", built) >= {"*u8": 1, "*u16": 2, "*fp32": 4}[kind] * built.values // 16
    converted = len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", built.ptx))
    assert converted == (built.values // 2 if constants.get("LARGEST") == E4M3["LARGEST"] else 0)
    costs_as_recorded(built, "operands", f"sm_{architecture}", name)


@pytest.mark.parametrize("width", [16, 768, 11008, 32768])
@pytest.mark.parametrize(
    "name", [name for name, (kernel, *_) in OPERANDS.items() if kernel == "rows_kernel"]
)
def test_operands_of_short_and_long_rows(name, width, tmp_path):
    built = operand(name, 90, tmp_path, width)
    assert list(faults(built)) == []
    assert narrow(built) == []


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_operands_where_no_instruction_converts(name, tmp_path):
    built = operand(name, 80, tmp_path, FORMAT=format_of(as_format("E4M3")))
    assert list(faults(built)) == []
    assert "e4m3x2" not in built.ptx


COSTS = json.loads(RECORD.read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[3] / "study" / "study-speed.md"


def milliseconds(instructions, moved_bytes):
    """Return the times of some elements by what a card issues and by what it moves.

    It issues to 132 x 128 lanes at 1.74 GHz, and moves 3 TB/s.
    """
    return instructions / (132 * 128 * 1.74e9) * 1e3, moved_bytes / 3e12 * 1e3


@pytest.mark.parametrize("name", STEPS)
def test_the_page_has_the_recorded_costs_of_a_step(name):
    """Those of 124M weights."""
    writeback, moments, _ = STEPS[name]
    moved = 2 + 8 + 4 * {"8bit": 1, "bfloat16": 2, "float32": 4}[moments]
    moved += 2 * (writeback == "residual8")
    needed = COSTS["sm_90"][name]["instructions"]
    issue, move = milliseconds(needed * 124e6, moved * 124e6)
    line = f"| {name} | {needed:.0f} | {moved:g} | {issue:.2f} | {move:.2f} |\n"
    assert line in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OPERANDS)
def test_the_page_has_the_recorded_costs_of_operands(name):
    """Those of 8,192 x 4,096 elements."""
    *_, moved = OPERANDS[name]
    needed = COSTS["operands"]["sm_90"][name]["instructions"]
    issue, move = milliseconds(needed * 2**25, moved * 2**25)
    line = f"| {name} | {needed:.1f} | {moved} | {issue:.3f} | {move:.3f} |\n"
    assert line in PAGE.read_text(encoding="utf-8")


def test_costs_are_recorded_of_every_step_and_operand():
    assert COSTS["sm_90"].keys() == STEPS.keys()
    assert COSTS["operands"]["sm_90"].keys() == OPERANDS.keys()


def costs(tmp):
    def recorded(kernels):
        return {
            n: {"instructions": round(b.instructions, 1), "registers": b.registers}
            for n, b in kernels.items()
        }

    record = {
        f"sm_{a}": recorded(
            {
                name: step(spec(writeback, moments), tile, a, tmp)
                for name, (writeback, moments, tile) in STEPS.items()
            }
        )
        for a in ARCHITECTURES
    }
    record["operands"] = {
        f"sm_{a}": recorded({n: operand(n, a, tmp) for n in OPERANDS}) for a in WITH_UNITS
    }
    return record


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        RECORD.write_text(json.dumps(costs(Path(folder)), indent=1) + "\n", encoding="utf-8")


def test_contraction_would_be_seen(tmp_path, monkeypatch):
    wrong = _triton.options() | {"enable_fp_fusion": True}
    monkeypatch.setattr(_triton, "options", lambda *_: wrong)
    writeback, moments, tile = STEPS["stochastic, float32 moments"]
    assert "contraction" in list(faults(step(spec(writeback, moments), tile, 90, tmp_path)))
