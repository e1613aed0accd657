"""A fault of a file is one line that names it.

Nothing is written, changed or run, whoever reads it.
"""

import json
import os
import shutil
from itertools import product
from pathlib import Path

import damages
import numpy as np
import pytest
import torch
from damages import GARBAGE, LAUGHS, Damage, contents
from readers import Reader, readers
from watched import MIB, watched

from nanogpt_bench.checkpoint import Contents, commit_checkpoint
from nanogpt_bench.loop.train import run
from nanogpt_bench.system import untrusted

#: what a YAML file says that is refused, whatever it is for
YAML = {
    f"text({LAUGHS!r})": f"more than {untrusted.MOST_YAML_VALUES:,} values",
    "text('a: &a {<<: [*a]}')": "contains it",
    "text('&a [*a]')": "contains it",
    f"text('[' + 'x,' * {untrusted.MOST_YAML_VALUES} + ']')": "values",
    "text('seed: ' + '9' * 5000)": "line 1: 999 & a number has at most 1,000 characters",
    "text('seed: ' + '1:' * 400_000 + '1')": "a number has at most 1,000 characters",
    "text('seed: !!int ' + '1:99:' * 160_000 + '1')": "a number has at most 1,000 characters",
    "text('seed: ' + '1:' * 400 + '1')": "YAML readers disagree on numbers with colons",
    "text('seed: !!python/object/apply:os.system [touch executed]')": "could not determine a "
    "constructor",
    "text('seed: !!python/name:os.system')": "could not determine a constructor",
    **{
        f"text({word!r})": "a value can't be read"
        for word in ("!!int x", "!!timestamp x", "!!bool x", "2001-99-99")
    },
    "text('{[1]: 2}')": "unhashable",
    "text('- 1\\n---\\n- 2')": "single document",
    "text('\\0')": "not allowed",
    "text('[' * 101 + ']' * 101)": "nested more than 100 levels deep",
    "text('1: a\\n0x1: b')": "'0x1' is given twice",
}
#: reader -> damage, as the file and an expression of `NAMES` -> what the line says of it,
#: its parts apart by " & "
DAMAGED = {
    "config": {
        **{f"a.yaml: {damage}": word for damage, word in YAML.items()},
        "a.yaml: text('model:\\n  n_layer: 1\\nmodel:\\n  n_head: 1')": "'model' is given twice, "
        "on lines 1 and 3",
        "a.yaml: text('train: {max_steps: 3, max_steps: 4}')": "'max_steps' is given twice, on "
        "line 1; keep one",
        "a.yaml: text('train.max_steps: 3\\ntrain:\\n  max_steps: 4')": "train.max_steps is given "
        "twice in & a.yaml'",
        "a.yaml: text('train:\\n  max_steps: 010')": "line 2: 010 is not allowed",
        "a.yaml: text('train:\\n  max_seconds: 1:30')": "line 2: 1:30 is not allowed",
    },
    "sweep": {
        **{f"a.yaml: {damage}": word for damage, word in YAML.items()},
        "a.yaml: text('settings:\\n  model.formats: {attn: E4M3}\\n  model.formats.attn: "
        "E5M2\\naxes: {seed: [1]}')": ("settings.model.formats.attn is given twice in & a.yaml'"),
    },
    "text": {
        "a.txt: gone()": "does not exist",
        "a.txt: text('')": "is empty",
        "a.txt: text('hello')": "too short",
        "a.txt: text(b'fine so far \\xff and on' * 100)": "not UTF-8: byte 0xff at position 12",
        "a.txt: text('na\\u00efve'.encode('utf-16') * 100)": "not UTF-8",
        "a.txt: instead(Path.mkdir)": "can't be read",
    },
    "corpus": {
        "train.bin: cut(1)": "uint16 tokens take two each",
        "train.bin: cut(10)": "tokens, but meta.json says",
        "val.bin: gone()": "val.bin' does not exist",
        "val.bin: text(b'')": "is empty",
        "val.bin: flipped()": "val.bin' has another sha256 than meta.json gives",
        "meta.json: gone()": "no meta.json but holds 'train.bin', which prepare did not write",
        "meta.json: text('{')": "is damaged",
        "meta.json: text('[]')": "is damaged",
        "meta.json: put('splits.train.sha256', '0' * 64)": "train.bin' has another sha256",
        "meta.json: put('splits.train.sha256', GONE)": "is damaged & sha256",
        "meta.json: put('splits.train.tokens', 'many')": "is damaged",
        "meta.json: put('vocab_size', 3)": "a vocabulary of 3, but its char tokenizer has",
        "meta.json: in_turn(put('vocab_size', 3), put('characters', 'abc'))": "holds token & but the "
        "vocabulary has 3",
        "meta.json: put('tokenizer', 'byte')": "a vocabulary of & its byte tokenizer has 257",
        "meta.json: put('tokenizer', 'gpt5')": "meta.json': unknown tokenizer 'gpt5'",
        "meta.json: put('characters', None)": "is damaged",
    },
    **{
        f"{command} on a corpus": {"meta.json: gone()": "has no meta.json"}
        for command in ("run", "compare")
    },
    "labels": {
        "train.labels.bin: gone()": "train.labels.bin' does not exist",
        "train.ends.bin: text('12345678')": "has another sha256",
        "train.ends.bin: signed(b'1234567')": "has another sha256",
        "train.ends.bin: signed(np.array([900, 800], '<u8').tobytes())": "do not match its tokens",
        "train.labels.bin: signed(b'\\2' * 1920)": "'train' has the label 2; only 0 and 1 are allowed",
        "meta.json: put('labels', ['a'])": "do not match its tokens",
        "meta.json: put('labels', [1])": "is damaged: its labels",
        "meta.json: put('labels', GONE)": "needs documents with labels",
    },
    "gpt2": {
        "config.json: gone()": "has no config.json",
        "config.json: text('{')": "can't be read",
        "config.json: put('activation_function', 'relu')": "activation_function 'relu'",
        "config.json: put('n_inner', 48)": "n_inner 48",
        "config.json: put('scale_attn_by_inverse_layer_idx', True)": "scale_attn_by_inverse_layer_idx "
        "True",
        "model.safetensors: cut(100)": "can't be read",
        "model.safetensors: tensors(h__1__mlp__c_fc__bias=GONE)": "missing weight "
        "'transformer.h.1.mlp.c_fc.bias'",
        "model.safetensors: tensors(h__2__ln_1__bias=torch.zeros(16))": "unexpected weight "
        "'h.2.ln_1.bias'",
        "model.safetensors: tensors(ln_f__bias=torch.zeros(17))": "can't be read",
    },
    "run from gpt2": {
        "config.json: put('n_layer', 10**9)": "model.init_from: model & describes 16,000,000",
        "config.json: put('n_embd', 10**9)": "model.init_from: model & config.json describes ",
        "model.safetensors: text(tensor_file([2**25, 2**23], 2**50))": "can't be read",
    },
    "floats": {
        "a.safetensors: text(b'\\x10\\0\\0\\0\\0\\0\\0\\0{')": "is not a complete safetensors file",
        "model.safetensors.index.json: put('weight_map', {'a': '../b.safetensors'})": "is not a file "
        "beside it",
        "model.safetensors.index.json: text('[]')": "can't be read as an index",
    },
    "results": {
        "x.json: text('{}')": "holds no results",
        'x.json: text(\'[{"kind": "else"}]\')': "holds no results",
        'x.json: text(\'[{"kind": "run"}]\')': "can't be read",
        'x.json: text(\'{"kind": "nanogpt-bench results"}\')': "has an earlier layout",
        'x.json: text(\'[{"label": 1, "label": 2}]\')': "the name 'label' is given twice",
    },
    "study": {"sweep.json: put('runs', [1])": "/it'", "tuning.json: text('{')": "/it/tuning.json'"},
    "run": {
        **{
            f"{name}: gone()": f"{name} is missing"
            for name in ("config.yaml", "metrics.jsonl", "summary.json")
        },
        "summary.json: text('[1]')": "summary.json",
        "config.yaml: text('a: [b')": "config.yaml",
    },
    "verify": {
        "metrics.jsonl: without_line(4)": "problem: metrics.jsonl: line 4 has step 4; step "
        "3 was expected",
        "metrics.jsonl: append('{\"step\": 6}\\n')": "problem: metrics.jsonl: line 8 has step 6; "
        "step 7",
        "metrics.jsonl: append('{\"step\": NaN}\\n')": "problem: metrics.jsonl: line 8 is not a "
        "record with a step",
        "metrics.jsonl: append('[' * 9000 + '\\n')": "problem: metrics.jsonl: line 8 is not a record "
        "with a step",
        "metrics.jsonl: cut()": "problem: metrics.jsonl: the last line is cut off",
        "summary.json: put('steps', 7)": "problem: summary.json has another sha256 than",
        "alerts.jsonl: append('{\"step\": 9}\\n')": "problem: & ends with step 9, but metrics.jsonl with "
        "step 6",
        'alerts.jsonl: append(\'{"step": 5}\\n{"step": 2}\\n\')': "problem: & line 2 has step 2, "
        "but follows step 5",
        "metrics.jsonl: gone()": "problem: metrics.jsonl is missing",
        "config.yaml: text('a: [1')": "problem: & config.yaml' is not valid YAML",
        "environment.json: gone()": "problem: environment.json is missing",
        "summary.json: cut()": "problem: summary.json can't be read: it is not JSON",
        "checkpoints/step-4.safetensors: cut()": "problem: & step-4.safetensors': has "
        "another sha256 than",
        "checkpoints: commit_to(8)": "problem: & step-8.safetensors' is later than the last step of metrics.jsonl, "
        "6",
    },
}


def commit_to(step: int) -> Damage:
    return lambda path: commit_checkpoint(path.parent, Contents(step, {}), keep_last=9)


NAMES = {**vars(damages), "np": np, "torch": torch, "commit_to": commit_to}
PLACES = []
for name, reader in readers(Path(), Path(), Path()).items():
    for file, takes in reader.files.items():
        PLACES += [(name, file, garbage) for garbage in GARBAGE if garbage not in takes]
DAMAGES = []
for name, damages_of_file in DAMAGED.items():
    DAMAGES += product([name], damages_of_file)


@pytest.fixture(scope="module")
def sources(corpus_dir, labelled_dir, tiny, tmp_path_factory):
    """Every reader with an undamaged file."""
    folder = tmp_path_factory.mktemp("whole")
    run(tiny(model__format="E4M3", monitor__interval=3), folder / "a")
    shutil.rmtree(folder / "a" / "checkpoints")
    for step in (4, 6):
        commit_checkpoint(
            folder / "a",
            Contents(step, {"model": {"w": torch.full((5,), float(step))}}),
            keep_last=2,
        )
    folders = {}
    for name, reader in readers(corpus_dir, labelled_dir, folder / "a").items():
        place = folder / name
        place.mkdir()
        reader.lay(place)
        folders[name] = (reader, place)
        if " on a " in name or " from " in name:  # those would train, or draw
            assert name == "report on a run" or reader.messages(folder / "missing"), name
        else:
            assert reader.messages(Path(shutil.copytree(place, folder / "copies" / name))) == [], (
                name
            )
    return folders


def messages_of(
    reader: Reader, whole: Path, file: str, damage: Damage, tmp_path: Path, grown: list[int]
) -> list[str]:
    """Return the lines about a damaged copy; nothing is written, changed or run."""
    folder = Path(shutil.copytree(whole, tmp_path / "it"))
    damage(folder / file)
    old_contents = contents(tmp_path)
    size = sum(len(data or b"") for data in old_contents.values())
    outcome = watched(lambda: reader.messages(folder))
    assert (outcome.raised, outcome.executions) == ("", [])
    assert contents(tmp_path) == old_contents
    assert outcome.grown <= 2 * size + 64 * MIB
    grown.append(outcome.grown)
    assert all(line.isprintable() and len(line) < 1000 for line in outcome.returned), (
        outcome.returned
    )
    return outcome.returned


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damage_is_named(name, damage, sources, working_folder, attacks):
    words = DAMAGED[name][damage].split(" & ")
    file, _, expression = damage.partition(": ")
    change = eval(expression, NAMES)
    messages = messages_of(*sources[name], file, change, working_folder, attacks)
    assert any(all(word in line for word in words) for line in messages), messages
    assert len(messages) == 1 or name == "verify"
    # A configuration and a sweep name a setting.
    if name not in ("config", "sweep"):
        text = "\n".join(messages)
        assert Path(file).name in text or str(working_folder / "it") in text, messages


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "file", "garbage"), PLACES)
def test_garbage_is_refused_by_every_reader(name, file, garbage, sources, working_folder, attacks):
    messages = messages_of(*sources[name], file, GARBAGE[garbage], working_folder, attacks)
    assert any(
        Path(file).name in line or str(working_folder / "it") in line for line in messages
    ), messages


def test_an_execution_would_be_seen():
    outcome = watched(lambda: [exec("1"), os.system("true")])
    assert {"exec", "compile", "os.system"} <= {event.split()[0] for event in outcome.executions}


def test_an_honest_alias_and_merge_are_read():
    text = "base: &base {a: 1, b: [2, 3]}\nother: {<<: *base, c: *base}\n"
    assert untrusted.parse_yaml(text)["other"] == {"a": 1, "b": [2, 3], "c": {"a": 1, "b": [2, 3]}}


@pytest.mark.parametrize(
    "text", ["9:" * 1000 + "h", "word " * 1000 + "end", "'" + "9" * 5000 + "'"]
)
def test_a_long_text_is_no_number(text):
    outcome = watched(lambda: untrusted.parse_yaml(f"note: {text}"))
    assert outcome.returned == {"note": text.strip("'")}


def test_a_number_is_read_to_the_bound():
    number = "9" * untrusted.LONGEST_NUMBER
    assert untrusted.parse_yaml(number) == int(number)
    with pytest.raises(untrusted.RefusedFile, match="at most"):
        untrusted.parse_yaml(number + "9")


@pytest.mark.parametrize("parse", [untrusted.parse_yaml, untrusted.parse_json])
def test_nesting_is_read_to_the_bound(parse):
    text = "[" * (untrusted.DEEPEST - 2) + "]" * (untrusted.DEEPEST - 2)
    assert json.dumps(parse(text)) == text


@pytest.mark.parametrize("parse", [untrusted.parse_yaml, untrusted.parse_json])
@pytest.mark.parametrize("depth", [untrusted.DEEPEST + 1, 100_000])
def test_nesting_beyond_the_bound_is_refused(parse, depth):
    with pytest.raises(untrusted.RefusedFile, match=f"nested more than {untrusted.DEEPEST} levels"):
        parse("[" * depth + "]" * depth)


@pytest.fixture
def places(tmp_path):
    """A folder with a file, a link to it and a pipe."""
    (tmp_path / "a.json").write_bytes(b"[1]      ")
    (tmp_path / "link").symlink_to("a.json")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_a_file_is_read_to_the_bound(places):
    path, link = places / "a.json", places / "link"
    assert untrusted.read_json(path) == untrusted.read_json(link) == [1]
    assert untrusted.read_text(path, limit=9) == "[1]      "


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param("a.json", {"limit": 8}, "more than 8 bytes", id="too long"),
        pytest.param("", {}, "not an ordinary file", id="folder"),
        pytest.param("pipe", {}, "not an ordinary file", id="pipe"),
        pytest.param("link", {"links": False}, "symbolic link", id="link"),
    ],
)
def test_only_an_ordinary_file_within_the_bound_is_read(places, name, options, message):
    with pytest.raises(untrusted.RefusedFile, match=message):
        untrusted.read_text(places / name, **options)
