"""Every command that a message, a help text or a page advises is one that can be given as it is printed."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from laws import each

import nanogpt_bench
from nanogpt_bench.cli import main, parse
from nanogpt_bench.config.settings import parse_overrides

SOURCES = sorted(Path(nanogpt_bench.__file__).parent.rglob("*.py"))
COMMAND = re.compile(
    r"nanogpt-bench ((?:prepare|run|evaluate|sample|finetune|compare|sweep|report|results|verify) [^\n;]*)"
)
#: a word that is there in place of a number
NUMBERS = {"N": "3", "NAME": "name", "word": "./word"}


def texts(path: Path) -> Iterator[str]:
    """Every text of a module, what is put into it as a word; docstrings and usages are none that is printed so."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "word" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


ADVISED = sorted(
    {
        found[1]
        for path in SOURCES
        for text in texts(path)
        for found in COMMAND.finditer(text)
        if not re.search(r"[\[|`]|--help|a\.yaml", found[0])
    }
)


@each("line", ADVISED)
def test_what_is_advised_can_be_parsed(line):
    assert len(ADVISED) > 40
    line = re.split(r" (?:writes|measures|rounds|prints) ", line)[0]
    words = [NUMBERS.get(word, word) for word in shlex.split(line)]
    parse_overrides(parse(words).overrides)


def test_advice_for_a_model_of_a_bare_name_and_a_folder_with_blanks_works(here, text_file, corpus_dir, refused):
    import causal_models

    for name in ("m", "gpt2", "with blanks"):
        causal_models.write(Path(name))
        said = refused("finetune", "--model", name, "--data.dir", corpus_dir, "--model.block_size", "16")
        advised = said.partition("nanogpt-bench ")[2].replace("FILE", str(text_file)).replace("DIR", f"'of {name}'")
        assert main(shlex.split(advised)) == 0
        tuned = f"--model '{name}' --data.dir 'of {name}' --model.block_size 16 --train.max_steps 1 --eval.batches 1"
        assert main(["finetune", *shlex.split(tuned)]) == 0
    assert main(["prepare", "text", "--input", str(text_file), "--tokenizer", "m", "--out", "bare"]) == 0
    said = refused("run", "fp32.yaml", "--data.dir", here / "a folder; of mine")  # as a shell reads it
    advised = shlex.split(said.partition("prepare it with: nanogpt-bench ")[2])
    assert advised == ["prepare", "stdlib", "--out", str(here / "a folder; of mine")]
