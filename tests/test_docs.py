"""The documentation builds without a warning, and its examples run.

What it says about the code is so.
"""

import contextlib
import doctest
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import fp8manifold as fm
from nanogpt_bench.cli import parse
from nanogpt_bench.config.settings import parse_overrides

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PLAIN = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
for folder in ("docs", "study", "docs/api"):
    PLAIN += sorted((ROOT / folder).glob("*.md"))
MEASURED = [
    *sorted((ROOT / "docs" / "api").glob("*.rst")),
    *sorted((ROOT / "docs" / "measured").rglob("*.json")),
    *sorted((ROOT / "study").rglob("*.json")),
]
#: modules that write pages and have doctests
WRITERS = sorted(
    path
    for path in (*(ROOT / "docs").glob("_*.py"), *(ROOT / "study").glob("_*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
)
#: what builds the site, and what `docs/_figures.py` draws with
IN_SPHINX = pytest.mark.extra("sphinx", "matplotlib")


@pytest.fixture
def _on_path(monkeypatch):
    for folder in ("docs", "study"):
        monkeypatch.syspath_prepend(ROOT / folder)


def path_in_repository(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


@IN_SPHINX
@pytest.mark.usefixtures("_on_path")
def test_the_site_describes_every_public_name_shows_every_figure_and_loads_nothing_from_elsewhere(
    tmp_path,
):
    ignored = shutil.ignore_patterns(
        "_build", "generated", "__pycache__", "study_*.json", "study_*.yaml"
    )
    for name in ("docs", "examples", "study"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.rmtree(tmp_path / "docs" / "examples", ignore_errors=True)
    (tmp_path / "fp8manifold").symlink_to(ROOT / "fp8manifold")  # pages link to its files
    shutil.copy(README, tmp_path)
    # -W turns every warning of the build into a failure, -n every reference without a
    # target. The project is imported from where the tests are.
    command = "-m sphinx -n -W --keep-going -q -d doctrees -b html docs site"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *command.split()]
    process = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stdout + process.stderr
    site = tmp_path / "site"
    inventory = (
        zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4])
        .decode()
        .splitlines()
    )
    parts = {
        f"fp8manifold.{name}": getattr(fm, name)
        for name in ("distributed", "files", "huggingface", "ops", "optim")
    }
    parts |= {"fp8manifold": fm, "fp8manifold.reference": fm.reference}
    public = set()
    for prefix, part in parts.items():
        public.update(f"{prefix}.{name}" for name in part.__all__)
    assert (
        public - {line.split()[0] for line in inventory if " py:" in line} - parts.keys() == set()
    )
    texts = {
        page.relative_to(site): page.read_text(encoding="utf-8") for page in site.rglob("*.html")
    }
    for name in import_module("_figures").FIGURES:
        assert (
            sum(
                f"_images/{name}.svg" in text
                for page, text in texts.items()
                if page.parent == Path()
            )
            == 1
        ), name
        assert (site / "_images" / f"{name}.svg").stat().st_size > 5000, name
    examples = {Path("examples", f"{path.stem}.html") for path in (ROOT / "examples").glob("*.py")}
    assert examples <= texts.keys()
    for page in examples:
        # what an example prints is not coloured as if it were code
        assert 'class="highlight-none' in texts[page], page
    for page, text in texts.items():
        assert (
            re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', text) == []
        ), page


def run_python(example: Example) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    example.namespace["printed"] = printed.getvalue()


def compare_output(example: Example) -> None:
    """Compare a block of text with what the Python before it printed.

    The comparison is doctest's.
    """
    preceding = example.document.text[: example.start].rstrip()
    if preceding.endswith("```") and preceding[:-3].rpartition("```")[2].startswith("python\n"):
        wanted, printed = str(example.parsed), example.namespace["printed"]
        assert doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS), printed


#: README's lines are run by `test_recipe.py`
WITH_CODE = [
    page
    for page in PLAIN
    if page not in (README, ROOT / "study" / "log.md") and blocks(page, "python")
]
RUNS = Sybil(
    [CodeBlockParser("python", run_python), CodeBlockParser("text", compare_output), SkipParser()]
)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_on_the_pages_prints_what_they_say(page, tmp_path):
    """The blocks of a page run one after the other.

    A comment skips what needs a hub, a GPU or several processes.
    """
    with contextlib.chdir(tmp_path), torch.random.fork_rng():
        for example in RUNS.parse(page).examples():
            example.evaluate()


@IN_SPHINX
@pytest.mark.usefixtures("_on_path")
@pytest.mark.parametrize("path", WRITERS, ids=path_in_repository)
def test_the_doctests_of_the_page_writers_pass(path):
    assert doctest.testmod(import_module(path.stem)).failed == 0


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.stem)
def test_pages_are_plain_markdown(page):
    """A repository shows the pages without leftovers of the documentation's markup.

    No role, directive, definition list or link without a text remains.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    assert [
        token.content
        for token in tokens
        if token.type == "inline" and re.search("^: ", token.content, re.M)
    ] == []
    fences = [token.info for token in tokens if token.type == "fence"]
    assert page.parent.name == "api" or not any(
        info.startswith("{") for info in fences
    )  # pages of the site alone
    parts = itertools.chain.from_iterable(token.children or [] for token in tokens)
    for one, two in itertools.pairwise(parts):
        assert not (one.type == "link_open" and two.type == "link_close"), one.attrs
        assert not (
            one.type == "text"
            and two.type == "code_inline"
            and re.search(r"\{[\w:-]+\}$", one.content)
        ), two


@pytest.mark.parametrize("page", PLAIN, ids=path_in_repository)
def test_images_are_described_and_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'!\[\]|<img (?![^>]*alt="[^"]{20})', text) == []
    targets = re.findall(r"\]\(([^)#\s]+)|<(?:img|source)[^>]* (?:src|srcset)=\"([^\"]+)\"", text)
    local = [
        target for target in map("".join, targets) if not target.startswith(("http", "mailto:"))
    ]
    assert [target for target in local if not (page.parent / target).exists()] == []


def commands_of(page: Path) -> set[str]:
    # one may go on in the next line
    lines = "\n".join(blocks(page, "(?:console|sh)")).replace("\\\n", " ")
    return set(re.findall(r"nanogpt-bench [^&\n]+|nanogpt-bench$", lines, re.MULTILINE))


@pytest.mark.parametrize("command", sorted(set().union(*map(commands_of, PLAIN))))
def test_commands_are_understood(command):
    parse_overrides(parse(shlex.split(command, comments=True)[1:]).overrides)


@pytest.mark.parametrize("page", [*PLAIN, *MEASURED], ids=path_in_repository)
def test_no_machine_is_named(page):
    assert re.findall(r"/tmp/|/work/|/root/|/home/", page.read_text(encoding="utf-8")) == []
