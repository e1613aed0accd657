"""The changes of the guide to extending work.

They are applied to a copy of the checkout, which then has all that they add.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "extending.md"
#: what the guide adds
KINDS = (
    "format",
    "optimizer",
    "optimizer to the bench",
    "setting to the bench",
    "write-back",
    "monitor",
    "chart",
)
#: run in the copy: trains with everything that was added, writes the report, and looks
#: where each should be told of
CHECK = """
import json, sys
from pathlib import Path

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config import schema
from nanogpt_bench.config.schema import OPTIONS

assert Path(fm.__file__).is_relative_to(Path.cwd()), fm.__file__
sys.path.insert(0, "docs")
import _tables

assert "| E3M3 | 7 | 3 | finite | 30 |" in _tables.formats_table()
assert fm.NAMED_FORMATS["E3M3"].max == 30
assert tuple(fm.optim.WRITEBACKS) == schema.WRITEBACKS
assert "`zeros/weight`" in _tables.metrics_tables()
assert all(f"`{key}`" in _tables.settings_sections() for key in ("monitor.watch", "runtime.matmul"))

Path("text.txt").write_text("the quick brown fox jumps over the lazy dogs\\n" * 300, encoding="utf-8")
assert main(["prepare", "text", "--input", "text.txt", "--tokenizer", "char", "--out", "corpus"]) == 0
settings = {
    "data.dir": "corpus", "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 16,
    "train.max_steps": 6, "train.batch_size": 4, "eval.interval": 3, "eval.batches": 2, "optimizer.warmup_steps": 2,
    "monitor.interval": 2, "model.format": "E3M3", "optimizer.name": "stiffness_signum",
    "optimizer.writeback": "carry8", "runtime.matmul": "high",
}
Path("one.yaml").write_text("seed: 1\\n", encoding="utf-8")
assert main(["run", "one.yaml", "--name", "one", *(f"--{key}={value}" for key, value in settings.items())]) == 0
records = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
assert [record["step"] for record in records if "zeros/weight" in record] == [2, 4, 6]
assert main(["report", "runs/one", "--out", "page"]) == 0
page = Path("page/report.html").read_text(encoding="utf-8")
assert all(title in page for title in ("Zero weights", "Perplexity by step"))
print("everything is there")
"""


def apply(change: str, folder: Path) -> str:
    """Make a change and return its file.

    The first line names the file, @@ parts the places, and each place occurs once.
    """
    name, _, text = change.partition("\n")
    path = folder / name
    whole = path.read_text(encoding="utf-8") if path.exists() else ""
    for place in text.split("@@\n"):
        lines = place.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert whole.count(old) == 1 if old else not path.exists(), (
            f"{name} has this not once:\n{old}"
        )
        whole = whole.replace(old, new) if old else new
    path.write_text(whole, encoding="utf-8")
    return name


def test_the_changes_of_the_guide_do_what_it_says(tmp_path):
    """Each kind of change touches at most two files, and does what the guide says."""
    for name in (
        "fp8manifold",
        "nanogpt_bench",
        "docs",
    ):  # what the guide changes and what it says follows
        ignored = shutil.ignore_patterns("__pycache__", "_build", "measured")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    sections = re.split(r"^###? (.+)$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    code_by_title = dict(zip(sections[::2], sections[1::2], strict=True))
    for kind in KINDS:
        text = code_by_title[f"Add {'an' if kind[0] in 'aeiou' else 'a'} {kind}"]
        changes = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        files = {apply(change, tmp_path) for change in changes}
        assert 0 < len(files) <= 2, kind
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tmp_path),
        "PYTHONIOENCODING": "utf-8",
    }
    command = [sys.executable, "-c", CHECK]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.stdout.endswith("everything is there\n"), process.stdout + process.stderr
