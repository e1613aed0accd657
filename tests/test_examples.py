"""Every example runs and prints what its docstring says.

It shows what it is there to show.
"""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = re.compile(r"\d+\.\d+")


#: what has to be so on every machine; n are the decimal figures in the order they are
#: printed, row by row
CLAIMS = {
    "geoopt_drop_in": lambda n: n[3] < 2 and n[1] > 2 * n[3],
    "stiffness_adamw": lambda n: n[0] < n[2] < 0.02 and n[1] > 2 * n[2],
    "digits_one_byte": lambda n: min(n[0], n[2], n[4]) > 0.94 and n[5] <= 3.2 and n[3] < 9.2,
    "muon_two_bytes": lambda n: min(n[0], n[2], n[4]) > 0.95 and n[3] <= 8.1 and n[5] <= 2.5,
    "custom_format": lambda n: n[6] < n[8] < n[4] and max(n[5], n[7], n[9]) < 0.05,
    "custom_writeback": lambda n: n[5] < 0.25 * n[1],
    "diffusion_one_byte": lambda n: max(n[1:3]) < 0.4 * n[0] and n[2] < n[1] + 0.1 and n[3] < 2.1,
    "read_run_folder": lambda n: n[2] < n[1] < n[0] and all(0 < share < 1 for share in n[3:]),
    "wrap_any_optimizer": lambda n: all(n[row + 1] < 0.6 * n[row] for row in (0, 3, 6)),
    "fisher_nngeometry": lambda n: n[5] < 0.4 and n[5] < n[3],
    "accelerate_digits": lambda n: n[3] > 0.9 and n[2] < 0.3,
    "lightning_digits": lambda n: n[3] > 0.9 and n[2] < 0.3,
    "finetune_per_layer": lambda n: (
        abs(n[1] - n[0]) < 0.05 and n[3] < n[1] - 0.2 and n[3] < n[2] + 0.1
    ),
    "finetune_llm": lambda n: abs(n[1] - n[0]) < 0.05 and n[2] < n[1] - 0.1 and n[3] < 3.3,
    "train_is_serve": lambda n: min(n[1], n[4]) > 0.8 > max(n[0], n[3]) and n[2] == 0 < 0.1 < n[5],
}
#: the packages that only the extra test-all brings
EXTRA = {
    "digits_one_byte": ["sklearn"],
    "muon_two_bytes": ["sklearn"],
    "fisher_nngeometry": ["sklearn", "nngeometry"],
    "accelerate_digits": ["sklearn"],
    "lightning_digits": ["lightning", "sklearn"],
    "diffusion_one_byte": ["diffusers", "sklearn"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.extra(*EXTRA[name]) if name in EXTRA else [])
        for name in CLAIMS
    ],
)
def test_example_prints_what_it_says(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    source = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    promised = ast.get_docstring(source).split("xpected output::\n\n")[1]
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", promised).split()
    figures = [float(figure) for figure in NUMBER.findall(printed)]
    assert CLAIMS[name](figures), printed
    # the claim is true of the docstring too, and its figures are about those of this
    # machine
    stated = [float(figure) for figure in NUMBER.findall(promised)]
    assert CLAIMS[name](stated)
    assert figures == pytest.approx(stated, rel=0.5, abs=0.02)


def test_every_example_is_covered_and_has_a_title():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == CLAIMS.keys()
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert set(lines[2]) == {"="}, path.name
        assert len(lines[1]) == len(lines[2]), path.name
