"""Build the native code of ``fp8manifold/_native`` where there is a C compiler.

::

    _interface.py, formats.py  -->  generated.h         tables of Python, as C has them
    *.c, *.h, generated.h      -->  _kernels.so

Everything works without it, slower. ctypes loads the library, which uses none of
Python's headers: one wheel per platform serves every version of Python.

``python hatch_build.py`` builds it in a checkout, after a change of the C code or of the
tables.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "fp8manifold"
FOLDER = f"{PACKAGE}/_native"
# No fused multiplications, no fast arithmetic: the bits are those of PyTorch's own
# operations.
FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
# Not every compiler knows it; faster where one does.
WIDE_VECTORS = "-mprefer-vector-width=512"


class NativeBuildHook(BuildHookInterface):
    """The hook that compiles the library into the package's folder.

    It tags the wheel with this platform.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before the files of a wheel are collected.

        A source distribution has the sources alone, without the header that is made of
        them.
        """
        if self.target_name != "wheel":
            return
        library = build(Path(self.root) / FOLDER, self.app.display_warning)
        if library is None:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"{FOLDER}/{library.name}")


def build(
    folder: Path, report: Callable[[str], object] = print, flags: tuple[str, ...] = ()
) -> Path | None:
    """Build the library from a folder's sources; return its path.

    Return None, after a message, if that is not possible.

    Args:
        folder: where the sources are and the library goes.
        report: called with the message.
        flags: the compiler gets them after its usual ones.
    """
    target = folder / "_kernels.so"
    compiler = compiler_of(os.environ)
    if compiler is None:
        target.unlink(missing_ok=True)
        report(
            "fp8manifold: no C compiler was found, so that steps and rounding run without native "
            "code"
        )
        return None
    header = header_text()
    (folder / _sources().HEADER).write_text(header, encoding="utf-8")
    # Replaced in one move: programs that start meanwhile find a whole library, and
    # those that run still have the old one.
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as build_folder:
        library = Path(build_folder) / target.name
        command = _command(compiler, folder, library, (_digest_flag(folder, header), *flags))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            target.unlink(missing_ok=True)
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            reason = f"{compiler[0]}: {lines[0]}"
            report(
                f"fp8manifold: the native code could not be built ({reason}); everything runs "
                "without it"
            )
            return None
        library.replace(target)
    return target


def _command(compiler: list[str], folder: Path, library: Path, flags: tuple[str, ...]) -> list[str]:
    """Return the compiler's command line for the sources of a folder."""
    options = [*FLAGS]
    if _takes(compiler, WIDE_VECTORS):
        options.append(WIDE_VECTORS)
    options += ["-shared", "-fPIC", *flags]
    sources = sorted(str(path) for path in folder.glob("*.c"))
    libraries = ["-lm"] if sys.platform == "win32" else ["-lm", "-lpthread"]
    return [*compiler, *options, "-o", str(library), *sources, *libraries]


def compiler_of(environment: Mapping[str, str]) -> list[str] | None:
    """Return the C compiler as a command, or None if there is none.

    It is the one that CC names, or the first of cc, gcc and clang that is installed.
    """
    named = environment.get("CC", "").split()
    if named:
        return named if shutil.which(named[0]) else None
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return None


def header_text() -> str:
    """Return the header that C has of Python's tables."""
    text: str = _sources().header_text(_module("_interface.py"), _module("formats.py"))
    return text


def _digest_flag(folder: Path, header: str) -> str:
    """Return the flag by which a library says what it was built from."""
    return f'-DSOURCES="{_sources().digest(folder, header)}"'


def _sources() -> ModuleType:
    return _module("_native/_sources.py")


@cache
def _module(path: str) -> ModuleType:
    """Load a file of the package alone: the package imports torch, which a build lacks."""
    source = Path(__file__).parent / PACKAGE / path
    spec = importlib.util.spec_from_file_location(f"{source.stem}_of_build", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _takes(compiler: list[str], flag: str) -> bool:
    command = [*compiler, flag, "-Werror", "-x", "c", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(build(Path(__file__).parent / FOLDER) is None)
