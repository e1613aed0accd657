"""`nanogpt-bench` and `python -m nanogpt_bench`: the program in `nanogpt_bench.cli`.

Ctrl-C raises an exception wherever Python is. While modules are imported nothing can
catch it, and nothing needs to be cleaned up, so that until then it ends the process at
once. This module therefore imports only what Python has imported by itself.
"""

import os
import signal
import sys


def main() -> int:
    """Run the command line of this process and return its exit code."""
    # A command that was started with Ctrl-C ignored, as in the background, ignores it.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, _quit)
    from nanogpt_bench import cli

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


def _quit(number: int, _: object) -> None:
    """End the process, as `cli.main` does for a command that can't be resumed."""
    os.write(2, b"nanogpt-bench: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
