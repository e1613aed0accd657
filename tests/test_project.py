"""A repository that can be depended on: a wheel's own test, URLs that are true, one version, no workflow amiss."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import fp8manifold as fm

ROOT = Path(__file__).parent.parent


def test_the_smoke_test_passes_here(capsys, monkeypatch):
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
def test_urls_are_those_of_the_repository_or_none(tmp_path, monkeypatch, origin, source):
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


def test_an_sdist_keeps_its_urls(tmp_path, monkeypatch):
    """Files around a copy of the sources don't change them."""
    monkeypatch.syspath_prepend(ROOT)
    text = "Name: fp8manifold\nProject-URL: Source, https://example.org/own/fp8\n\nProject-URL: not, metadata\n"
    (tmp_path / "PKG-INFO").write_text(text, encoding="utf-8")
    assert import_module("hatch_urls").urls(tmp_path) == {"Source": "https://example.org/own/fp8"}


README = """![a](RAW/docs/a.svg) [b](BLOB/docs/b.md#c), [d](#e) [f](https://e.org) [h](BLOB/CONTRIBUTING.md) `[i](j)`
<picture><source srcset="RAW/docs/k.png"><img src="RAW/docs/l.png"></picture>
```python
m = n["o"](p)
```"""


def test_links_of_readme_lead_to_the_tag_where_it_is_read_elsewhere(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    described = import_module("hatch_urls").described
    source, here = "https://github.com/own/fp8", README.replace("RAW/", "").replace("BLOB/", "")
    there = README.replace("RAW", f"{source}/raw/v1.2").replace("BLOB", f"{source}/blob/v1.2")
    assert described(here, source, "1.2") == there
    assert described(here, "", "1.2") == described(here, "https://example.org/own/fp8", "1.2") == here


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## (\d.+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == f"{fm.__version__} - {citation['date-released']}"
    assert citation["version"] == fm.__version__
    assert f"version = {{{fm.__version__}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_missing_package_is_the_markers_business():
    """`pytest -m extra` finds what is marked; what a test asks for itself is in no extra of the tests, or torch's."""
    asked = r'importorskip\(\s*"(\w+)'
    found = {name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(asked, path.read_text("utf-8"))}
    assert found == {"build", "sdnq", "triton"}


def test_a_package_in_the_way_of_the_default_tests_is_marked():
    """An import of a `test-all` package at a test module's top level would stop collecting."""
    only = {"datasets", "diffusers", "lightning", "matplotlib", "nngeometry", "optimi", "peft", "PIL", "ray", "sklearn"}
    only |= {"sphinx", "tensorboard", "trl", "wandb"}
    marked = r"mark\.extra\(([^*)]*)\)"
    names = [re.findall(marked, path.read_text("utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name.strip('" ') for found in names for given in found for name in given.split(",")} <= only
    imports = re.compile(rf"^(?:import|from) (?:{'|'.join(sorted(only))})\b", re.MULTILINE)
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if imports.search(path.read_text("utf-8"))] == []
