"""`python -m nanogpt_bench`: the same as the command nanogpt-bench."""

import sys

from nanogpt_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
