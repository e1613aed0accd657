"""Run programs in forks of a process that has imported torch, and neither this library
nor geoopt.

    echo '{"name": "print(1)"}' | python -W error fresh_programs.py

A fork takes a fraction of a second, where a process that imports torch takes several.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

LIBRARY = Path(__file__).parent
ROOT = LIBRARY.parent.parent


def outputs_of(programs):
    """Return what each program prints, its errors too, by its name.

    A warning is an error.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, LIBRARY)))}
    process = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env=environment,
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def output_of(program):
    """Run a program in a fork of this process."""
    with tempfile.TemporaryFile("w+") as file:
        pid = os.fork()
        if pid == 0:
            run(program, file)
        os.waitpid(pid, 0)
        file.seek(0)
        return file.read()


def run(program, file):
    """Run a program that prints to a file, and end the process."""
    with contextlib.redirect_stdout(file):
        try:
            exec(program, {"__name__": "program"})
        except BaseException:
            traceback.print_exc(file=file)
    file.flush()
    os._exit(0)


if __name__ == "__main__":
    import torch
    import torch._dynamo  # noqa: F401  # which every optimizer imports

    json.dump({name: output_of(text) for name, text in json.load(sys.stdin).items()}, sys.stdout)
