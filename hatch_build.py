"""Builds the native code of ``fp8manifold/_native`` where there is a C compiler;
everything works without it, slower.

ctypes loads the library, which uses none of Python's headers: one wheel per platform
serves every version of Python.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "fp8manifold/_native"
#: no fused multiplications, no fast arithmetic: the bits are those of the eager stages
FLAGS = (
    "-std=c11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)


class NativeBuildHook(BuildHookInterface):
    """Compiles the library into the package's folder, and tags the wheel with this
    platform.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before the files of a wheel are collected; a source distribution has
        the sources alone.
        """
        if self.target_name != "wheel":
            return
        built = build(Path(self.root) / FOLDER, self.app.display_warning)
        if built is None:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(f"{FOLDER}/{built.name}")


def build(folder: Path, say: Any = print, flags: tuple[str, ...] = ()) -> Path | None:
    """Path of the library, built from a folder's sources; None, after a message, where
    that is not possible.

    Args:
        folder: where the sources are and the library goes.
        say: called with the message.
        flags: the compiler gets them after its usual ones.
    """
    target = folder / "_kernels.so"
    compiler = compiler_of(os.environ)
    if compiler is None:
        target.unlink(missing_ok=True)
        say(
            "fp8manifold: no C compiler was found, so that steps and rounding run without native "
            "code"
        )
        return None
    # replaced in one move: programs that start meanwhile find a whole library, those
    # that run still have the old one
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as beside:
        built = Path(beside) / target.name
        done = subprocess.run(
            _command(compiler, folder, built, flags), capture_output=True, text=True, check=False
        )
        if done.returncode:
            target.unlink(missing_ok=True)
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            reason = f"{compiler[0]}: {lines[0]}"
            say(
                f"fp8manifold: the native code could not be built ({reason}); everything runs "
                f"without it"
            )
            return None
        built.replace(target)
    return target


def _command(compiler: list[str], folder: Path, built: Path, flags: tuple[str, ...]) -> list[str]:
    """The compiler's command line for the sources of a folder."""
    sources = sorted(str(path) for path in folder.glob("*.c"))
    wide = ("-mprefer-vector-width=512",) if _takes(compiler, "-mprefer-vector-width=512") else ()
    options = (*FLAGS, *wide, "-shared", "-fPIC", f'-DSOURCES="{digest(folder)}"', *flags)
    return [
        *compiler,
        *options,
        "-o",
        str(built),
        *sources,
        "-lm",
        *(() if sys.platform == "win32" else ("-lpthread",)),
    ]


def compiler_of(environment: Any) -> list[str] | None:
    """The C compiler as a command: the one that CC names, or the first of cc, gcc and
    clang that is installed.
    """
    asked = environment.get("CC", "").split()
    if asked:
        return asked if shutil.which(asked[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def digest(folder: Path) -> str:
    """Digest of the sources: compiled into the library, and compared when it is loaded."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.[ch]")):
        found.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return found.hexdigest()[:16]


def _takes(compiler: list[str], flag: str) -> bool:
    command = [*compiler, flag, "-Werror", "-x", "c", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(build(Path(__file__).parent / FOLDER) is None)
