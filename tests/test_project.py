"""A repository that can be depended on.

A wheel's own test, URLs that are true, one version, any processor.
"""

import ast
import os
import platform
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import fp8manifold as fm
from fp8manifold.optim import _matrices

ROOT = Path(__file__).parent.parent


@pytest.fixture
def hatch_urls(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return import_module("hatch_urls")


def test_the_smoke_test_passes_here(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests")
    import_module("smoke").main(native=False)
    assert capsys.readouterr().out.endswith(": passed\n")


@pytest.mark.parametrize("remote", ["origin", "upstream"])
@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("https://name:word@example.org/own/fp8.git", "https://example.org/own/fp8"),
        ("ssh://git@example.org:2222/own/fp8/", "https://example.org/own/fp8"),
        ("git@github.com:own/fp8.git", "https://github.com/own/fp8"),
        ("/somewhere/on/a/disk", None),
    ],
    ids=["https", "ssh", "GitHub", "a folder"],
)
def test_urls_are_those_of_the_repository(url, source, remote, tmp_path, hatch_urls):
    """They are of the remote called origin alone."""
    config = tmp_path / ".git" / "config"
    config.parent.mkdir()
    config.write_text(
        f'[core]\n\tbare = false\n[remote "{remote}"]\n\turl = {url}\n\tfetch = +refs\n'
    )
    urls = hatch_urls.urls(tmp_path)
    expected = source if remote == "origin" else None
    assert urls.get("Source") == expected
    assert ("Issues" in urls) == ("github.com" in (expected or ""))


def test_without_a_repository_there_are_no_urls_and_an_sdist_keeps_them(tmp_path, hatch_urls):
    assert hatch_urls.urls(tmp_path) == {}
    text = "Name: fp8manifold\nProject-URL: Source, https://example.org/own/fp8\n\nProject-URL: not, metadata\n"
    (tmp_path / "PKG-INFO").write_text(text, encoding="utf-8")
    assert hatch_urls.urls(tmp_path) == {"Source": "https://example.org/own/fp8"}


README = """![a](RAW/docs/a.svg) [b](BLOB/docs/b.md#c), [d](#e) [f](https://e.org) [h](BLOB/CONTRIBUTING.md) `[i](j)`
<picture><source srcset="RAW/docs/k.png"><img src="RAW/docs/l.png"></picture>
```python
m = n["o"](p)
```"""


def test_links_of_readme_lead_to_the_tag_where_it_is_read_elsewhere(hatch_urls):
    source, readme_of_checkout = (
        "https://github.com/own/fp8",
        README.replace("RAW/", "").replace("BLOB/", ""),
    )
    readme_elsewhere = README.replace("RAW", f"{source}/raw/v1.2").replace(
        "BLOB", f"{source}/blob/v1.2"
    )
    assert hatch_urls.described(readme_of_checkout, source, "1.2") == readme_elsewhere
    assert hatch_urls.described(readme_of_checkout, "", "1.2") == readme_of_checkout
    assert (
        hatch_urls.described(readme_of_checkout, "https://example.org/own/fp8", "1.2")
        == readme_of_checkout
    )


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(
        r"^## (\d.+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert released[0] == f"{fm.__version__} - {citation['date-released']}"
    assert citation["version"] == fm.__version__
    assert f"version = {{{fm.__version__}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_study_is_cited_by_the_tag_that_a_release_sets():
    cited = re.findall(
        r"study-\d{4}-\d\d", (ROOT / "study" / "README.md").read_text(encoding="utf-8")
    )
    set_tags = re.findall(
        r"git tag -a (study-\S+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    assert {*cited} == {*set_tags} != set()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86-64")
@pytest.mark.parametrize(("name", "kernels"), [("no AVX", "DEFAULT"), ("AVX2", "AVX2")])
def test_the_baseline_is_a_processor_without_products_in_bfloat16(name, kernels):
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    variables = ast.literal_eval(
        re.search(r"^OLDER_PROCESSORS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)[1]
    )[name]
    code = "import torch; from fp8manifold.optim._matrices import product_dtype as dtype\n"
    code += "print(torch.backends.cpu.get_cpu_capability(), dtype(torch.device('cpu')))"
    capability = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env=os.environ | variables
    )
    assert capability.split() == [kernels, "torch.float32"]


def session_tests(constant: str) -> list[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    value = re.search(rf"^{constant} = (\(.*?\))", text, re.MULTILINE | re.DOTALL)[1]
    return list(ast.literal_eval(value))


@pytest.mark.parametrize("name", session_tests("FIRST") + session_tests("FAIL_WITH_AMX"))
def test_sessions_name_tests_that_exist(name):
    file, _, test = name.partition("::")
    assert (ROOT / file).is_dir() or test in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("has_onednn", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_torch_without_onednn_has_products_in_float32(has_onednn, dtype, monkeypatch):
    """Its builds for Macs of ARM lack the operator that is asked, too."""
    operators = (
        SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True) if has_onednn else SimpleNamespace()
    )
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda answer=has_onednn: answer)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert _matrices.product_dtype(torch.device("cpu")) is dtype
