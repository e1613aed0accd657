"""The documentation builds without a warning, its examples run, and what it says about the code is so."""

import contextlib
import doctest
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

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
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "study").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.*")),
]
#: what builds the site, and what `docs/_figures.py` draws with
IN_SPHINX = pytest.mark.extra("sphinx", "matplotlib")
NAMESPACES = ("distributed", "huggingface", "ops", "optim", "reference")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def bench_commands() -> list[str]:
    text = "\n".join("\n".join(blocks(page, "(?:console|sh)")) for page in PAGES if page.suffix == ".md")
    text = text.replace("\\\n", " ")  # a command may go on in the next line
    return sorted(set(re.findall(r"nanogpt-bench [^&\n]+|nanogpt-bench$", text, re.MULTILINE)))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # doctest looks for functions of this very module
    sys.path[:0] = folders = [str(path.parent), str(ROOT / "docs")]  # as in the build
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.path[: len(folders)]
    return module


def sphinx(folder: Path, builder: str, target: str) -> None:
    """Build the pages of a folder; examples are put on pages, and run by their own tests."""
    # Sphinx's own and its extensions' deprecations are not ours to see: its -W turns every warning of the build
    # into a failure, -n every reference without a target.
    build = ["-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-d", "doctrees"]
    # The project is imported from where the tests are, also where it is not installed.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *build, "-b", builder, "docs", target]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    ignored = shutil.ignore_patterns("_build", "generated", "examples", "__pycache__")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=ignored)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "study", folder / "study", ignore=shutil.ignore_patterns("__pycache__", "*.json", "*.yaml"))
    (folder / "fp8manifold").symlink_to(ROOT / "fp8manifold")  # pages link to its files
    shutil.copy(README, folder)
    sphinx(folder, "html", "site")
    return folder / "site"


def documented(site: Path) -> set[str]:
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(content).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


@IN_SPHINX
def test_the_site_describes_every_public_name(site: Path) -> None:
    parts = {name: getattr(fm, name) for name in NAMESPACES}
    namespaces = {"fp8manifold": fm, **{f"fp8manifold.{name}": part for name, part in parts.items()}}
    public = {f"{prefix}.{name}" for prefix, namespace in namespaces.items() for name in namespace.__all__}
    assert public - documented(site) - namespaces.keys() == set()


@IN_SPHINX
def test_figures_are_each_on_one_page_and_examples_have_their_own(site: Path) -> None:
    texts = [page.read_text(encoding="utf-8") for page in site.glob("*.html")]
    for name in load(ROOT / "docs" / "_figures.py").FIGURES:
        assert sum(f"_images/{name}.svg" in text for text in texts) == 1, name
        assert (site / "_images" / f"{name}.svg").stat().st_size > 5000
    names = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in names if not (site / "examples" / f"{name}.html").exists()] == []


def run_python(example: Example) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    example.namespace["printed"] = printed.getvalue()


def compare_output(example: Example) -> None:
    """Compare a block of text that follows one of Python with what that one printed, as doctest does."""
    before = example.document.text[: example.start].rstrip()
    if before.endswith("```") and before[:-3].rpartition("```")[2].startswith("python\n"):
        wanted, printed = str(example.parsed), example.namespace["printed"]
        assert doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS), printed


PLAIN = [page for page in PAGES if page.suffix == ".md"]
#: README's lines are run by `test_recipe.py`
WITH_CODE = [page for page in PLAIN if page not in (README, ROOT / "study" / "log.md") and blocks(page, "python")]
RUNS = Sybil([CodeBlockParser("python", run_python), CodeBlockParser("text", compare_output), SkipParser()])


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_on_the_pages_prints_what_they_say(page: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after the other; a comment skips what needs a hub, a GPU or several processes."""
    with contextlib.chdir(tmp_path), torch.random.fork_rng():
        for example in RUNS.parse(page).examples():
            example.evaluate()


@IN_SPHINX
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', text) == [], page.name


@IN_SPHINX
def test_the_doctests_of_the_page_writers_pass() -> None:
    for path in sorted({*(ROOT / "docs").glob("_*.py"), *(ROOT / "study").glob("_*.py")}):
        assert ">>>" not in path.read_text(encoding="utf-8") or doctest.testmod(load(path)).failed == 0, path


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.stem)
def test_pages_are_plain_markdown(page: Path) -> None:
    """As a repository shows them, no role, directive, definition list or link without a text is left over."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    assert [token.content for token in tokens if token.type == "inline" and re.search("^: ", token.content, re.M)] == []
    fences = [token.info for token in tokens if token.type == "fence"]
    assert page.parent.name == "api" or not any(info.startswith("{") for info in fences)  # pages of the site alone
    parts = [child for token in tokens for child in token.children or []]
    for one, two in itertools.pairwise(parts):
        assert not (one.type == "link_open" and two.type == "link_close"), one.attrs
        assert not (one.type == "text" and two.type == "code_inline" and re.search(r"\{[\w:-]+\}$", one.content)), two


def test_readme_comes_to_its_code_within_120_words() -> None:
    before = README.read_text(encoding="utf-8").partition("```")[0]
    assert 30 < len(re.sub(r"<.*>|\]\(\S+\)", "", before).split()) <= 120  # pictures and links' targets left out


def test_links_lead_somewhere_commands_are_understood_and_no_machine_is_named() -> None:
    for page in (page for page in PAGES if page.suffix == ".md"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'!\[\]|<img (?![^>]*alt="[^"]{20})', text) == [], page.name
        targets = re.findall(r"\]\(([^)#\s]+)|<(?:img|source)[^>]* (?:src|srcset)=\"([^\"]+)\"", text)
        local = [target for target in map("".join, targets) if not target.startswith(("http", "mailto:"))]
        assert [target for target in local if not (page.parent / target).exists()] == [], page.name
    for command in bench_commands():
        parse_overrides(parse(shlex.split(command, comments=True)[1:]).overrides)
    for page in [*PAGES, *(ROOT / "docs" / "measured").rglob("*.json"), *(ROOT / "study").rglob("*.json")]:
        assert re.findall(r"/tmp/|/work/|/root/|/home/", page.read_text(encoding="utf-8")) == [], page.name
