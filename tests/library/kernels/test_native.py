"""Native code.

It has the bits of plain PyTorch, checks its arguments, and is optional: without it there
is one warning and the same result.
"""

import contextlib
import copy
import importlib.util
import io
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from optimizer_cases import bits_of, normal, take_steps
from test_step_paths import CASES, everything, take

import fp8manifold as fm
from fp8manifold import _native, optim
from fp8manifold._native import _arrays, is_available
from fp8manifold._native._arrays import round_at_scale
from fp8manifold._native._sources import HEADER
from fp8manifold.optim import _native_step
from fp8manifold.optim._streams import content_word
from fp8manifold.random_bits import draw_key

FOLDER = Path(_arrays.__file__).parent
ROOT = FOLDER.parent.parent
FORMATS = (
    *(
        "E4M3",
        "E5M2",
        "E3M4",
        "E1M6",
        "E7M0",
        "E2M5",
        "E2M1",
        "E2M3",
        "E6M1",
        "E4M3FNUZ",
        "E5M2FNUZ",
        "E4M3IEEE",
    ),
    *("P3109_8P3", "P3109_8P4F", "E5M2_B30", "E7M0_B100", "E7M0_B30"),
)
formats = pytest.mark.parametrize("name", FORMATS)
needs_native = pytest.mark.skipif(
    not is_available(), reason="the native code was not built: there is no C compiler"
)


@pytest.fixture
def plain(monkeypatch):
    """Call a function as where there is no native code."""

    def call(function, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(_arrays, "library", lambda: None)
            patch.setattr(_native_step, "library", lambda: None)
            return function(*args, **kwargs)

    return call


def any_floats(n, seed):
    """Return random bit patterns; NaN, infinities, zeros and subnormals are among them."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    patterns[:6] = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7FC00000, 1])
    near = normal(n, seed=seed) * torch.exp2(normal(n, seed=seed + 1).mul(4).round())
    return torch.where(torch.arange(n) % 2 == 0, patterns.view(torch.float32), near)


def same(results, expected):
    assert results.dtype == expected.dtype
    assert results.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[results.element_size()]
    equal = results.view(integer) == expected.view(integer)
    return bool(
        (
            equal | (results.isnan() & expected.isnan()) if results.is_floating_point() else equal
        ).all()
    )


@needs_native
@formats
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("n", [1, 17, 100_003])
def test_rounding_and_codes(name, rounding, n, plain):
    x = any_floats(max(n, 6), 3)[:n]
    options = (
        {}
        if rounding == "nearest"
        else {"seed": 2**63, "step": 7, "stream": 2**40, "offset": 2**32 - 5 * n}
    )
    assert same(
        fm.round_to_grid(x, name, rounding, **options),
        plain(fm.round_to_grid, x, name, rounding, **options),
    )
    numbers = x[~x.isnan()] if fm.FloatFormat.from_string(name).nan_code is None else x
    assert same(
        fm.encode(numbers, name, rounding, **options),
        plain(fm.encode, numbers, name, rounding, **options),
    )


@needs_native
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, None, 37], ids=["1", "all", "37"])
def test_all_codes(name, dtype, n, plain):
    fmt = fm.FloatFormat.from_string(name)
    codes = torch.arange(2 * fmt.sign_bit, dtype=torch.uint8).repeat(20)[:n]
    assert same(fm.decode(codes, fmt, dtype), plain(fm.decode, codes, fmt, dtype))


@needs_native
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scale", [(), (9, 1)])
@pytest.mark.parametrize("draws", ["independent", "dither"])
def test_scaled_rounding(rounding, draws, scale, plain):
    x, scales = any_floats(9 * 131, 5).view(9, 131), normal(*scale, seed=2).abs() + 0.01
    arguments = (x, scales, fm.FloatFormat(4, 3), rounding, draw_key(draws, 1, 2, 3))
    assert same(
        round_at_scale(*arguments, blocks=False), plain(round_at_scale, *arguments, blocks=False)
    )


@needs_native
@pytest.mark.parametrize("n", [0, 1, 1000, 200_001])
def test_the_word_of_a_content(n, plain):
    x = any_floats(max(n, 6), n)[:n]
    assert content_word(x, (1, 2, 3)) == plain(content_word, x, (1, 2, 3))


@needs_native
@pytest.mark.parametrize("storage", ["codes", "grid"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_threads_change_nothing(storage, moments):
    results = []
    for threads in (1, 2, 5):
        model = torch.nn.Sequential(
            torch.nn.Linear(700, 300), torch.nn.Linear(300, 701), torch.nn.Linear(5, 3)
        )
        for i, p in enumerate(model.parameters()):
            p.data = normal(*p.shape, seed=i, std=0.1)
        fm.quantize_model(model, "E4M3", storage=storage, seed=1)
        optimizer = optim.StiffnessAdamW(model.parameters(), lr=1e-2, moments=moments)
        old_count = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            take_steps([optimizer], [model.parameters()], range(3))
        finally:
            torch.set_num_threads(old_count)
        results.append([bits_of(p) for p in model.parameters()])
    assert results[0] == results[1] == results[2]


@needs_native
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.double(),
        lambda x: x.flatten()[:-1],
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.empty_like(x, device="meta"),
    ],
    ids=["dtype", "size", "strides", "device"],
)
def test_memory_of_another_kind_is_refused(wrong):
    p = torch.nn.Parameter(normal(6, 10))
    p.grad = normal(6, 10)
    optimizer = optim.StiffnessAdamW([p], lr=0.1)
    optimizer.step()
    slots, old_values = [], p.detach().clone()
    optimizer._take = slots.extend
    optimizer.step()
    slots[0].tensors["exp_avg"] = wrong(slots[0].tensors["exp_avg"])
    with pytest.raises(
        RuntimeError, match=r"a step needs 60 contiguous elements of torch\.float32 on the CPU"
    ):
        _native_step.run_native(slots)
    assert torch.equal(p, old_values)


def build_hook():
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(tmp_path):
    for path in {*FOLDER.glob("*.[ch]")} - {FOLDER / HEADER}:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


needs_sources = pytest.mark.skipif(
    not (ROOT / "hatch_build.py").exists(), reason="an installed package has no build"
)


@needs_sources
@pytest.mark.parametrize(
    ("compiler", "word"),
    [
        ("/nowhere/cc", "no C compiler was found"),
        ("false", "could not be built (false: exit code 1)"),
    ],
)
def test_a_build_that_fails_says_so_and_goes_on(compiler, word, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    messages = []
    assert build_hook().build(sources(tmp_path), messages.append) is None
    assert len(messages) == 1
    assert word in messages[0]
    assert not (tmp_path / "_kernels.so").exists()


STEPS = """
import warnings, torch, fp8manifold as fm
from fp8manifold import _native
_native.__file__ = folder + "/__init__.py"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.set_num_threads(1)
    w = [fm.FP8Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i)) * 0.1, f, granularity="channel",
         seed=i) for i, (s, f) in enumerate([((33, 70), "E4M3"), ((5, 7), "E7M0"), ((3, 64), "E5M2")])]
    for kind, options in [("StiffnessAdamW", {}), ("StiffnessAdamW", {"moments": "8bit", "writeback": "residual8"}),
                          ("RiemannianAdam", {"lr": 1.0, "writeback": "momentum"}), ("StiffnessLion", {}),
                          ("StiffnessAdamW", {"moments": "bfloat16"}), ("StiffnessSGD", {"lr": 0.1, "momentum": 0.9})]:
        o = getattr(fm.optim, kind)(w, **options)
        for t in range(3):
            for p in w:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
            o.step()
    fm.round_to_grid(torch.randn(1001), "E5M2", "stochastic", seed=1)
    missing = [c for c in caught if c.category is _native.NativeUnavailableWarning]
print(_native.is_available(), len(missing), *[str(c.message).split("(")[1].split(")")[0] for c in missing])
print(sum(int(p.codes.long().sum()) for p in w))
"""


@pytest.fixture
def look_in(monkeypatch):
    """Return a function after which the library is looked for in another folder."""

    def look(folder):
        monkeypatch.setattr(_native, "__file__", str(folder / "__init__.py"))
        _native._load.cache_clear()

    yield look
    _native._load.cache_clear()


def run_steps(look_in, folder):
    """Take these steps with the native code of a folder, and return what they print."""
    look_in(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(STEPS, {"folder": str(folder)})
    return printed.getvalue().splitlines()


def steps_of_a_process(folder, **environment):
    command = [sys.executable, "-c", f"folder = {str(folder)!r}\n{STEPS}"]
    process = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.strip().splitlines()


def test_without_native_code_there_is_one_warning_and_the_same_result(look_in, tmp_path):
    available = is_available()
    printed = run_steps(look_in, tmp_path)
    assert printed[0] == "False 1 there was no C compiler to build it, or it was removed since"
    if available:
        assert run_steps(look_in, FOLDER) == ["True 0", printed[1]]


@needs_native
def test_a_library_of_other_sources_is_not_used(look_in, tmp_path):
    folder = sources(tmp_path)
    (folder / "_kernels.so").write_bytes((FOLDER / "_kernels.so").read_bytes())
    (folder / "step.c").write_text((folder / "step.c").read_text() + "\n")
    assert run_steps(look_in, folder)[0] == "False 1 it was built from other sources"
    (folder / "_kernels.so").unlink()  # it is mapped, and must stay what it was
    (folder / "_kernels.so").write_bytes(b"no library")
    assert run_steps(look_in, folder)[0].startswith("False 1 ")


@needs_native
def test_a_library_that_is_lost_or_replaced_while_it_is_used_goes_on(look_in, tmp_path):
    look_in(sources(tmp_path))
    library = tmp_path / "_kernels.so"
    library.write_bytes((FOLDER / "_kernels.so").read_bytes())
    codes, fmt = torch.arange(120, dtype=torch.uint8), fm.formats.FloatFormat(4, 3)
    old_values = _arrays.decode_by_kernel(codes, fmt)
    assert old_values is not None
    library.unlink()
    assert torch.equal(_arrays.decode_by_kernel(codes, fmt), old_values)
    library.write_bytes(b"another")
    assert torch.equal(_arrays.decode_by_kernel(codes, fmt), old_values)


def test_where_warnings_are_errors_it_is_said_once_too(look_in, tmp_path):
    look_in(tmp_path)
    with pytest.raises(_native.NativeUnavailableWarning, match="or it was removed since"):
        fm.round_to_grid(torch.ones(3), "E4M3")
    assert fm.round_to_grid(torch.ones(3), "E4M3").tolist() == [1.0] * 3


@needs_sources
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_build_never_leaves_half_a_library_to_be_loaded(succeeds, tmp_path, monkeypatch):
    """The old one is there until the new one takes its place at once, as another file."""
    hook, folder = build_hook(), sources(tmp_path)
    names = {path.name for path in folder.iterdir()}
    (folder / "_kernels.so").write_bytes(b"the old one")
    running = (folder / "_kernels.so").open("rb")
    observed = []

    def compiles(command, **_):
        if "-o" in command:
            observed.append((folder / "_kernels.so").read_bytes())
            Path(command[command.index("-o") + 1]).write_bytes(b"half")
            observed.append((folder / "_kernels.so").read_bytes())
        return subprocess.CompletedProcess(command, 0 if succeeds else 1, "", "stopped")

    monkeypatch.setattr(hook, "compiler_of", lambda _: ["cc"])
    monkeypatch.setattr(hook.subprocess, "run", compiles)
    with running:
        assert (hook.build(folder, lambda _: None) is not None) is succeeds
        assert observed == [b"the old one"] * 2
        assert running.read() == b"the old one"
    assert {path.name for path in folder.iterdir()} == {*names, HEADER} | (
        {"_kernels.so"} if succeeds else set()
    )
    assert (folder / HEADER).read_text() == hook.header_text()
    assert not succeeds or (folder / "_kernels.so").read_bytes() == b"half"


@pytest.mark.slow
@needs_sources
@needs_native
def test_no_access_out_of_bounds_and_nothing_undefined(tmp_path):
    """Under sanitizers of addresses and undefined behaviour; an error ends the process."""
    if shutil.which("gcc") is None:
        pytest.skip("the sanitizers of gcc are what is asked")
    names, capture = (
        ("libasan.so", "libstdc++.so"),
        {"capture_output": True, "text": True, "check": True},
    )
    paths = [
        subprocess.run(["gcc", f"-print-file-name={name}"], **capture).stdout.strip()
        for name in names
    ]
    if not all(map(os.path.isabs, paths)):
        pytest.skip("there is no sanitizer here")
    flags = (
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-DONE_CLONE",
        "-g",
        "-O1",
    )
    assert build_hook().build(sources(tmp_path), print, flags) is not None
    result = steps_of_a_process(
        tmp_path, LD_PRELOAD=" ".join(paths), ASAN_OPTIONS="detect_leaks=0", CC="gcc"
    )
    assert result == ["True 0", steps_of_a_process(FOLDER)[1]]


@pytest.mark.slow
@needs_sources
def test_a_source_distribution_builds_a_wheel_with_and_without_a_compiler(tmp_path):
    """With a compiler the wheel is of the platform and any Python, else of any platform."""

    def hatch(target, cwd, **environment):
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            target,
            "-d",
            str(tmp_path / "dist"),
        ]
        subprocess.run(command, cwd=cwd, env=os.environ | environment, check=True)
        return max((tmp_path / "dist").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    sdist = hatch("sdist", ROOT)
    subprocess.run(["tar", "xzf", str(sdist), "-C", str(tmp_path)], check=True)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not list(unpacked.rglob("_kernels*"))
    assert not list(unpacked.rglob(HEADER))
    without = hatch("wheel", unpacked, CC="/nowhere/cc")
    assert without.name.endswith("-py3-none-any.whl")
    names = {Path(name).name for name in zipfile.ZipFile(without).namelist()}
    assert "step.c" in names
    assert [name for name in names if "_kernels" in name] == []
    if is_available():
        wheel = hatch("wheel", unpacked)
        assert "-py3-none-" in wheel.name
        assert not wheel.name.endswith("-any.whl")
        assert "_kernels.so" in {Path(name).name for name in zipfile.ZipFile(wheel).namelist()}


#: Widths that code is compiled for, but the widest, and flags of processors that run it.
WIDTHS = {"x86-64": {"sse2"}, "x86-64-v3": {"avx2", "bmi2", "fma"}}


def flags_of_this_processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return set(
        next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split()
    )


def results():
    assert _native.is_available()
    bits_by_name = {}
    for name, (kind, make, options) in CASES.items():
        optimizer = getattr(optim, kind)(make(), **copy.deepcopy(options))
        for step in range(2):
            take(optimizer, step)
        bits_by_name[name] = everything(optimizer)
    for fmt in ("E4M3", "E5M2", "E7M0", "E2M5"):
        x = normal(1003, seed=1) * torch.exp2(normal(1003, seed=2).mul(5).round())
        codes = fm.encode(x, fmt)
        arrays = [codes, fm.decode(codes, fmt), fm.FP8Parameter(x, fmt, seed=4).dequantize()]
        arrays += [fm.round_to_grid(x, fmt), fm.round_to_grid(x, fmt, "stochastic", seed=3)]
        bits_by_name[fmt] = [bits_of(array) for array in arrays]
    bits_by_name["content"] = _arrays.content(normal(1003), (1, 2, 3), 5)
    return bits_by_name


@needs_native
@needs_sources
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_has_the_same_bits(width, look_in, tmp_path, monkeypatch):
    if platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("code of several widths is made by gcc for x86-64 alone")
    if not WIDTHS[width] <= flags_of_this_processor():
        pytest.skip(f"this processor does not run {width}")
    expected = results()
    monkeypatch.setenv("CC", "gcc")
    assert (
        build_hook().build(sources(tmp_path), print, ("-DONE_CLONE", f"-march={width}")) is not None
    )
    look_in(tmp_path)
    built = results()
    assert not [name for name in expected if expected[name] != built[name]]
