"""What a repository needs to be depended on: workflows that name what exists, URLs that are true, one version."""

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    """The steps of every job of a workflow."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [step for job in content["jobs"].values() for step in job.get("steps", ())]


def commands(path: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps(path))


def sessions() -> set[str]:
    """The names of nox's sessions, read without nox."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def test_the_workflows_are_those_of_a_project() -> None:
    assert {path.stem for path in WORKFLOWS} == {"lint", "tests", "docs", "wheels", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_parses_and_says_that_it_has_never_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert content["name"] == path.stem
    assert True in content  # `on`, as YAML 1.1 reads it
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= content["jobs"].keys()
        assert "uses" in job or job["timeout-minutes"] > 0
    assert text.startswith("# This workflow has never run")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_only_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"nox -s (\w+)", text)) <= sessions()
    extras = {name for names in re.findall(r"\.\[([\w,-]+)\]", text) for name in names.split(",")}
    assert extras <= PROJECT["project"]["optional-dependencies"].keys()
    for name in re.findall(r"uses: \./(\S+)", text):
        assert (ROOT / name).is_file(), name
    named = re.findall(
        r"\b((?:tests|docs|benchmarks|examples)/[\w/-]+\.py|[\w-]+\.(?:toml|cff|md)|hatch_\w+\.py)", text
    )
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert all(re.search(r"@v?[\w./-]+$", step["uses"]) for step in steps(path) if "uses" in step)


def test_what_is_tested_is_what_the_project_promises() -> None:
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"].values()
    matrix = job["strategy"]["matrix"]
    promised = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if ":: 3." in line]
    assert matrix["python"] == promised == ["3.11", "3.12", "3.13", "3.14"]
    constraints = {entry["torch"]: entry["constraint"] for entry in matrix["include"]}
    (lowest,) = (name for name in PROJECT["project"]["dependencies"] if name.startswith("torch"))
    assert constraints == {"oldest": f"{lowest.replace('>=', '==')}.*", "newest": lowest}


def test_wheels_are_built_for_every_python_and_pass_the_smoke_test() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    built = {f"3.{name[3:-2]}" for name in settings["build"].split()}
    assert built == {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if ":: 3." in line}
    script = re.search(r"\{project\}/(\S+)", settings["test-command"])
    assert script is not None
    assert (ROOT / script[1]).is_file()


def test_the_smoke_test_passes_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests")
    import_module("smoke").main(native=False)
    assert capsys.readouterr().out.endswith(": passed\n")


ORIGINS = {
    "https://example.org/own/fp8.git": "https://example.org/own/fp8",
    "https://name:word@example.org/own/fp8": "https://example.org/own/fp8",
    "git@example.org:own/fp8.git": "https://example.org/own/fp8",
    "ssh://git@example.org/own/fp8/": "https://example.org/own/fp8",
    "ssh://git@example.org:2222/own/fp8.git": "https://example.org/own/fp8",
    "git@github.com:own/fp8.git": "https://github.com/own/fp8",
    "/somewhere/on/a/disk": None,
    "../beside": None,
}


@pytest.mark.parametrize(("origin", "source"), ORIGINS.items())
def test_urls_are_those_of_the_repository_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, source: str | None
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    urls = import_module("hatch_urls").urls
    assert urls(tmp_path) == {}
    config = tmp_path / ".git" / "config"
    config.parent.mkdir()
    config.write_text(
        f'[core]\n\tbare = false\n[remote "origin"]\n\turl = {origin}\n\tfetch = +refs\n[branch "main"]\n'
    )
    assert urls(tmp_path).get("Source") == source
    assert ("Issues" in urls(tmp_path)) == (source is not None and "github.com" in source)
    other = config.read_text(encoding="utf-8").replace("origin", "upstream")
    config.write_text(other, encoding="utf-8")
    assert urls(tmp_path) == {}


def test_an_sdist_keeps_its_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies around a copy of the sources says nothing of them."""
    monkeypatch.syspath_prepend(ROOT)
    text = "Name: fp8manifold\nProject-URL: Source, https://example.org/own/fp8\n\nProject-URL: not, metadata\n"
    (tmp_path / "PKG-INFO").write_text(text, encoding="utf-8")
    assert import_module("hatch_urls").urls(tmp_path) == {"Source": "https://example.org/own/fp8"}


def test_one_version_everywhere_and_a_first_release_that_differs_from_nothing() -> None:
    version = PROJECT["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert cited["version"] == version
    newest = re.findall(r"^## (\S+)", text, re.MULTILINE)[0]
    assert newest == version
    assert len(text.splitlines()) <= 80
    assert re.findall(r"### (?:Changed|Fixed|Removed)|[Dd]iffer from (?:before|the first version)", text) == []
