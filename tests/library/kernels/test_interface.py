"""The tables that Python shares with C and with Triton's kernels.

C has them as the header that the build writes: what a compiler makes of it is compared
with what Python counts on.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fp8manifold as fm
from fp8manifold import _interface, _native, formats
from fp8manifold._interface import (
    ARRAY,
    ENUMERATIONS,
    FLOAT32_TERMS,
    NUMBERS,
    POSITIONS,
    RECORDS,
    WIDENING,
    Enumeration,
    Geometry,
    KernelDirection,
    KernelMetric,
    KernelWriteBack,
    MomentStorage,
    NativeReport,
    Record,
    StiffnessPower,
    WeightStorage,
    format_facts,
    numbers_in_c,
)
from fp8manifold._native import _sources
from fp8manifold._numerics.codec import largest_bits
from fp8manifold._numerics.records import dtype_of, struct_of
from fp8manifold._triton.kinds import TileScales

ROOT = Path(fm.__file__).parent.parent
KERNELS = ROOT / "fp8manifold" / "_triton"
by_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
needs_sources = pytest.mark.skipif(
    not (ROOT / "hatch_build.py").exists(), reason="an installed package has no build"
)


@pytest.fixture(scope="module")
def hook():
    if not (ROOT / "hatch_build.py").exists():
        pytest.skip("an installed package has no build")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiler(hook):
    command = hook.compiler_of(os.environ)
    if command is None:
        pytest.skip("there is no C compiler")
    return command


def compiled(compiler, folder, header, body=""):
    """Compile a program that includes a header; return the compiler's process."""
    (folder / _sources.HEADER).write_text(header)
    program = f'#include <stdio.h>\n#include "{_sources.HEADER}"\nint main(void) {{\n{body}\n}}\n'
    (folder / "main.c").write_text(program)
    command = [*compiler, "-std=c11", "-o", str(folder / "main"), str(folder / "main.c")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def expressions_of_layouts():
    for record in RECORDS:
        yield f"sizeof({record.name})"
        for field in record.fields:
            yield f"offsetof({record.name}, {field.name})"
    for choice, prefix in ENUMERATIONS:
        for member in choice:
            yield f"{prefix}{member.name}"
    for name in NativeReport._fields:
        yield name.upper()


def bits_of_float(expression):
    return f"*(const int32_t *)&{expression}"


def expressions_of_constants():
    for name in ("MOMENT_FORMAT", "MOMENTUM_FORMAT"):
        for fact, kind in _interface.Format.__annotations__.items():
            yield bits_of_float(f"{name}.{fact}") if kind is float else f"{name}.{fact}"
    for name in ("EXP2_SERIES", "LOG2_SERIES"):
        for term in range(FLOAT32_TERMS):
            yield bits_of_float(f"{name}[{term}]")
    for number in (1, 2, 3):
        yield from (f"HASH_SHIFT_{number}", f"HASH_MULTIPLIER_{number}")


@pytest.fixture(scope="module")
def in_c(hook, compiler, tmp_path_factory):
    """The integers that a compiled program prints, by the expressions of C."""
    expressions = [*expressions_of_layouts(), *expressions_of_constants()]
    lines = [f'printf("%lld\\n", (long long)({expression}));' for expression in expressions]
    folder = tmp_path_factory.mktemp("in_c")
    process = compiled(compiler, folder, hook.header_text(), "\n".join(lines))
    assert process.returncode == 0, process.stderr
    printed = subprocess.run([folder / "main"], capture_output=True, text=True, check=True)
    return dict(zip(expressions, map(int, printed.stdout.split()), strict=True))


# --------------------------------------------------------------------------------------
# Python and C


@by_record
def test_a_struct_has_the_offsets_of_the_record(record, in_c):
    offsets = {
        field.name: in_c[f"offsetof({record.name}, {field.name})"] for field in record.fields
    }
    assert offsets == record.offsets
    assert in_c[f"sizeof({record.name})"] == record.size


@pytest.mark.parametrize("enumeration", ENUMERATIONS, ids=lambda e: e.choice.__name__)
def test_a_choice_has_the_number_that_python_passes(enumeration, in_c):
    choice, prefix = enumeration
    numbers = {member.name: in_c[f"{prefix}{member.name}"] for member in choice}
    assert numbers == numbers_in_c({member.name: member for member in choice})


def test_the_way_in_which_scales_are_shared_is_passed_as_it_is():
    assert numbers_in_c(_interface.ScaleSharing.__members__) == _interface.ScaleSharing.__members__


def test_a_report_has_its_words_where_python_reads_them(in_c):
    places = [in_c[name.upper()] for name in NativeReport._fields]
    assert places == list(range(len(NativeReport._fields)))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_where_python_writes_it(number, in_c):
    assert in_c[f"offsetof(Hyper, {number})"] == 4 * POSITIONS[number]


@pytest.mark.parametrize("name", ["MOMENT_FORMAT", "MOMENTUM_FORMAT"])
def test_a_format_of_moments_has_the_facts_of_the_format(name, in_c):
    facts = vars(format_facts(formats.as_format(getattr(_interface, name))))
    largest = facts.pop("largest")
    assert {fact: in_c[f"{name}.{fact}"] for fact in facts} == facts
    # `top` is the same value as bits
    assert in_c[bits_of_float(f"{name}.largest")] == facts["top"]
    assert largest == np.int32(facts["top"]).view(np.float32)


@pytest.mark.parametrize("name", ["EXP2_SERIES", "LOG2_SERIES"])
def test_a_series_has_the_float32_bits_of_its_terms(name, in_c):
    terms = np.array(getattr(_interface, name)[:FLOAT32_TERMS]).astype(np.float32)
    bits = [in_c[bits_of_float(f"{name}[{term}]")] for term in range(FLOAT32_TERMS)]
    assert bits == terms.view(np.int32).tolist()


def test_rounds_of_the_hash_are_those_of_python(in_c):
    rounds = [(in_c[f"HASH_SHIFT_{i}"], in_c[f"HASH_MULTIPLIER_{i}"]) for i in (1, 2, 3)]
    assert rounds == list(zip(_interface.HASH_SHIFTS, _interface.HASH_MULTIPLIERS, strict=True))


#: differences between the header and the tables, as (text, other text)
DRIFTS = {
    "a field is missing": ("    float eps;\n", ""),
    "fields are exchanged": (
        "    int64_t rows;\n    int64_t length;\n    int32_t scales;\n",
        "    int32_t scales;\n    int64_t rows;\n    int64_t length;\n",
    ),
    "fields of one type are exchanged": (
        "    float beta1;\n    float gain1;\n",
        "    float gain1;\n    float beta1;\n",
    ),
    "a field is wider": ("    int32_t repeats;", "    int64_t repeats;"),
    "a field is added": ("    float largest;\n", "    float largest;\n    float second;\n"),
    "an inner record is larger": ("    uint32_t phase;\n", "    uint64_t phase;\n"),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_struct_that_is_not_the_records_does_not_compile(drift, hook, compiler, tmp_path):
    text, other = DRIFTS[drift]
    header = hook.header_text()
    assert text in header
    assert compiled(compiler, tmp_path, header).returncode == 0
    process = compiled(compiler, tmp_path, header.replace(text, other))
    assert process.returncode != 0
    assert re.search("static.assert(ion)? failed", process.stderr)


# --------------------------------------------------------------------------------------
# The build and the loader


@needs_sources
def test_the_build_reads_the_tables_without_torch_and_numpy():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "import hatch_build; print(hatch_build.header_text(), end='')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == _sources.header_text(_interface, formats)


def _longer(record):
    return Record(record.name, (*record.fields, _interface.Field("x", "float")))


#: other tables than those that the library was compiled from
OTHER_TABLES = {
    "members in another order": (
        "ENUMERATIONS",
        (Enumeration(MomentStorage), *ENUMERATIONS[:3], *ENUMERATIONS[4:]),
    ),
    "a member more": ("NativeReport", _interface.GpuReport),
    "a field more": ("RECORDS", (*RECORDS[:-1], _longer(ARRAY))),
    "another format of moments": ("MOMENTUM_FORMAT", "E3M4"),
    "another constant": ("HASH_SHIFTS", (17, 11, 14)),
}


@pytest.mark.skipif(not _native.is_available(), reason="the native code was not built")
@pytest.mark.parametrize("difference", OTHER_TABLES)
def test_a_library_of_other_tables_is_not_used(difference, monkeypatch):
    assert _native._load.__wrapped__().kernels is not None
    monkeypatch.setattr(_interface, *OTHER_TABLES[difference])
    loaded = _native._load.__wrapped__()
    assert loaded.kernels is None
    assert "(it was built from other sources)" in loaded.pending_warnings[0]


# --------------------------------------------------------------------------------------
# NumPy and struct

NUMPY_TYPES = {"int32_t": np.int32, "uint32_t": np.int32, "int64_t": np.int64, "float": np.float32}


def aligned_dtype(record):
    """A record as NumPy aligns it by the rules of C compilers."""
    columns = []
    for name, kind, _ in record.fields:
        if isinstance(kind, Record):
            columns.append((name, aligned_dtype(kind)))
        else:
            columns.append((name, np.uint64 if kind.endswith("*") else NUMPY_TYPES[kind]))
    return np.dtype(columns, align=True)


every_record = pytest.mark.parametrize(
    "record", [*RECORDS, WIDENING], ids=lambda record: record.name
)


@every_record
def test_a_record_is_aligned_as_numpy_aligns(record):
    dtype = aligned_dtype(record)
    assert {name: dtype.fields[name][1] for name in dtype.names} == record.offsets
    assert dtype.itemsize == record.size


@every_record
def test_arrays_of_a_record_have_their_columns_where_its_fields_are(record):
    dtype = dtype_of(record)
    assert dtype.itemsize == record.size
    for field in record.fields:
        name = field.array or field.name
        of_field, start = dtype.fields[name][:2]
        width = aligned_dtype(record).fields[field.name][0].itemsize
        assert (
            start + record.column(field.name) * (width if field.array else 0)
            == (record.offsets[field.name])
        ), field
        # neighbours fill the array
        assert (of_field.itemsize % width) == 0, field


@by_record
def test_struct_packs_as_numpy_does(record):
    packed = struct_of(record)
    dtype = aligned_dtype(record)
    values = []
    expected = np.zeros((), dtype=dtype)
    for i, name in enumerate(dtype.names, 3):
        of_field = dtype.fields[name][0]
        value = bytes(range(i, i + of_field.itemsize)) if of_field.names else i
        values.append(value)
        expected[name] = np.frombuffer(value, of_field)[0] if of_field.names else value
    assert packed.size == record.size
    assert packed.unpack(expected.tobytes()) == tuple(values)
    assert packed.unpack(packed.pack(*values)) == tuple(values)


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E7M0", "E2M5", "E2M1", "E4M3FNUZ", "E1M6_B-3"])
def test_the_largest_value_has_the_bits_that_the_codec_computes(name):
    fmt = fm.FloatFormat.from_string(name)
    facts = format_facts(fmt)
    assert facts.top == largest_bits(fmt)
    assert facts.largest == fmt.max


# --------------------------------------------------------------------------------------
# Triton

DTYPES = {"float32", "bfloat16", "float16", "uint8"}
#: what a fact of a kernel can be
VALUES = {
    "direction": set(KernelDirection),
    "storage": set(WeightStorage),
    "writeback": set(KernelWriteBack),
    "moments": {*MomentStorage, ""},
    "geometry": set(Geometry),
    "stiffness": set(StiffnessPower),
    "MODE": set(StiffnessPower),
    "metric": set(KernelMetric),
    "scales": set(TileScales),
    "weight": DTYPES,
    "gradient": DTYPES,
    "DTYPE_NAME": DTYPES,
}


def compared_names(source):
    """Yield (fact, value) where a kernel compares a fact with a string."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        fact = node.left
        name = fact.attr if isinstance(fact, ast.Attribute) else getattr(fact, "id", "")
        for value in node.comparators:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield name, value.value


@pytest.mark.parametrize("module", ["format", "stages", "step"])
def test_kernels_compare_facts_with_values_that_these_can_have(module):
    compared = list(compared_names((KERNELS / f"{module}.py").read_text(encoding="utf-8")))
    assert compared
    assert [pair for pair in compared if pair[1] not in VALUES[pair[0]]] == []


def test_a_name_that_no_fact_can_have_is_found():
    source = 'if SPEC.storage == "code":\n    pass\nif MODE == "sqrt":\n    pass\n'
    compared = list(compared_names(source))
    assert compared == [("storage", "code"), ("MODE", "sqrt")]
    assert [pair for pair in compared if pair[1] not in VALUES[pair[0]]] == [("storage", "code")]
