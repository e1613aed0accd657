"""Make the tables and figures of the study's pages from the files in `results`.

Those that are stale are made, or all with --all. With --front it prints README's table
of the study and that of the page on optimizers, and draws README's pictures instead.
Modules that the study shares with the site's other pages are in `docs`.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "docs")]

from _front import OPTIMIZERS_PAGE_ROWS, front_table  # noqa: E402
from _frontier import write_pictures  # noqa: E402
from _generated import Maker, Pages  # noqa: E402

STUDY = Pages(
    HERE,
    {
        "steps": Maker("_measured", "write_measured", quick=True),
        "results": Maker("_front", "write_front", "results/study_q[12]*.json"),
        "study": Maker("_study", "write_study", "results/*.json ../docs/measured/study_steps.json"),
    },
    "python study/make.py",
)


def main() -> None:
    """Make the tables and figures, or with --front README's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="make everything, minutes")
    parser.add_argument(
        "--front", action="store_true", help="print the two tables and draw README's pictures"
    )
    arguments = parser.parse_args()
    if arguments.front:
        print(f"{front_table()}\n{front_table(OPTIMIZERS_PAGE_ROWS)}")
        write_pictures()
    else:
        STUDY.write(arguments.all)
        print(STUDY.report(STUDY.stale()) or "every table and figure is fresh")


if __name__ == "__main__":
    main()
