"""Every wrong command line is one line that says what is wrong.

Every command that is advised can be given.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanogpt_bench
from nanogpt_bench.cli import main, parse
from nanogpt_bench.config.settings import parse_overrides

#: files of the folder that a command is given in; RUN is a run, MODEL a pretrained one,
#: CHARS and OWN are corpora
FILES = {
    "fp32.yaml": "rule: fp32\n",
    "parallel.yaml": "settings: {rule: fp32, train.parallel: ddp}\naxes: {seed: [1, 2]}\n",
}
#: a comparison of three rows
ROWS = "compare --formats E4M3 --rules sgd,stochastic --out out"
#: a tiny run on CHARS
SMALL = "--model.n_layer=1 --model.n_embd=16 --model.n_head=2 --eval.batches=1"
#: a measurement of a pretrained model, of a text and of none
MODEL = "evaluate --out out --model MODEL"
MEASURED = f"{MODEL} --input TEXT"
#: a training of one
TUNED = "finetune --model MODEL --data.dir OWN --model.block_size=16"
COMPARED = "compare --task classify --rules fp32,stochastic --max-steps 4 --out none"
#: what is said, its parts apart by " & ", by the words that are refused
REFUSED = {
    "cmpare": "did you mean 'compare'",
    # options of commands
    "prepare eurlx": "did you mean 'eurlex' & allowed: stdlib, packages, eurlex, hub, text",
    "prepare stdlib --data-dir x": "--data-dir 'x' & prepare eurlex and hub",
    "prepare eurlex --dataset x": "--dataset 'x' & prepare hub",
    "prepare eurlex --data-dir gone": "--data-dir 'gone' & not a folder",
    "prepare eurlex --data-dir x --revision main": "--revision 'main' & --data-dir",
    "prepare eurlex --task label": "--task: 'label' is not known; did you mean 'labels'?",
    "prepare stdlib --task labels": "--task 'labels' is an option of prepare eurlex, not of prepare "
    "stdlib",
    "prepare hub --column text": "prepare hub needs --dataset ID",
    "prepare hub --dataset a/b": "prepare hub needs --column COL",
    "prepare stdlib --limit-tokens 0": "--limit-tokens & '0' & >= 1",
    "prepare stdlib --limit-tokens 649": "--limit-tokens 649 & 650 or more",
    "prepare stdlib --tokenizer gpt3": "gpt3 & did you mean 'gpt2' & allowed: byte, char, gpt2",
    "prepare stdlib --packages oci": "--packages",
    "prepare text": "--input FILE",
    "evaluate RUN --out=": "--out '' is not allowed; give a value",
    "run ''": "argument '' is not allowed",
    "verify ''": "argument '' is not allowed",
    "sample RUN --temperature 1e-400": "--temperature & '1e-400' is not allowed",
    "prepare text --input gone.txt": "gone.txt & does not exist",
    "run": "CONFIG.yaml",
    "run e4m3.yml": "e4m3.yml & did you mean 'e4m3.yaml'",
    "run e4m3.yaml --name a/b": "--name & a/b",
    "run e4m3.yaml --name ''": "--name & is not allowed",
    "run bf16_baseline.yaml --data.dir gone": "gone & prepare stdlib",
    f"run bf16_baseline --data.dir=CHARS {SMALL} --model.block_size=5000": "a block of 5000 needs "
    "5001; give a longer "
    "text or a smaller "
    "--model.block_size",
    "run fp32": "config 'fp32' could mean 'fp32.yaml' here or the shipped",
    "run fp32.yaml --train.max_steps=3 --train.max_steps 4": "error: --train.max_steps is given twice; "
    "keep one",
    "run fp32.yaml --name=x --model.init_from=RUN --model.n_embd=32": "model.n_embd: 32 "
    "contradicts the checkpoint",
    "run fp32.yaml --model.init_from=RUN --model.block_size=99": "model.block_size: 99 is more than the "
    "16 positions",
    **{
        f"run --defaults {arguments}": "leave everything else out"
        for arguments in ("fp32.yaml", "--name x", "--resume")
    },
    "run fp32.yaml --data.dir=CHARS --eval.also gone": "eval.also 'gone' does not exist in & "
    "--eval.also",
    "run fp32.yaml --data.dir=CHARS --tracking.wandb_artifacts true": "has no effect while tracking.wandb is off",
    "run fp32.yaml --model.init_from=RUN/nothing": "nothing' does not exist; give",
    "run fp32.yaml --model.init_from=RUN/checkpoints/step-5": "step-5' does not exist; give a "
    "run's folder, or one of its "
    "checkpoints: & step-6.safetensors",
    "compare --executor rai": "unknown --executor 'rai'; did you mean 'ray'",
    "compare --fromats E4M3": "--fromats & did you mean '--formats'",
    "compare --rules stochastik": "stochastik & 'stochastic'",
    "compare --formats E4M33": "'E4M33' & 'E4M3'",
    "compare --data.dir absent": "absent & prepare stdlib",
    "compare --seeds 0": "--seeds & '0' & >= 1",
    "compare --rules fp32 --formats E4M3": "all rules of --rules train floats (fp32); leave "
    "--formats out",
    "report RUN --baseline a --reference=b": "error: --reference is given twice; keep one",
    "compare --rules fp32 --train.parallel ddp": "train.parallel: 'ddp' works only with torchrun -m "
    "nanogpt_bench run",
    COMPARED: "--task classify needs --data.dir",
    f"{COMPARED} --data.dir CHARS --model.n_layer=1 --model.block_size=16": "needs documents with "
    "labels",
    "compare --seeds 1000000 --formats E4M3": "7 rows at --seeds 1,000,000 asks for 7,000,000 runs",
    f"{ROWS} --rule nearest": "--rule & give --rules",
    f"{ROWS} --model.format E4M3": "--model.format & --formats",
    f"{ROWS} --optimizer.name sgd": "--optimizer.name & --rules",
    f"{ROWS} --optimizer.constrained_lr 0.5": "--optimizer.constrained_lr & any row & bf16-mixed, "
    "sgd, E4M3 stochastic",
    f"{ROWS} --train.max_steps 9 --max-steps 8": "--train.max_steps 9 & --max-steps 8",
    f"{ROWS} --model.n_embd 130": "model.n_embd & 132 & at rule 'bf16-mixed'",
    "report": "RUNS",
    "verify": "RUN",
    "verify gone": "gone & does not exist",
    "sweep parallel.yaml": "'ddp' works only with torchrun -m nanogpt_bench run; each run of a sweep",
    "sweep format.yaml": "did you mean 'formats.yaml'",
    "sweep formats.yaml --executor local --address 1.2.3.4:6379": "--address '1.2.3.4:6379' needs "
    "--executor ray",
    # results files
    "results export .": "--out is missing",
    "results export . --out x.json": "holds no results",
    "results export . --out x.txt": "ends in .json",
    "results show x.json --out y.json": "--out is an option of results export",
    "results show x.json": "results file 'x.json' does not exist",
    "results show x.json y.json": "y.json",
    "results show RUN": "is a folder, not a results file; & folder: nanogpt-bench results export",
    # weights of a run: samples
    "sample nothing": "'nothing' is not a run's folder",
    "sample RUN --formats E4M33": "did you mean 'E4M3'",
    "sample RUN --tokens 0": "'0' is not allowed; give a whole number >= 1",
    "sample RUN --seed 99999999999999999999": "give a whole number >= 0",
    "sample RUN --temperature nan": "give a number >= 0",
    "sample RUN --top-k x": "give a whole number >= 1",
    "sample RUN --model.storage codes": "--model.storage: no row has a format; give --formats",
    "sample RUN --optimizer.lr 1": "the run is trained already",
    # weights of a run: losses
    "evaluate RUN --checkpoint step-4": "no checkpoint 'step-4'; allowed: best, last, step-3, "
    "step-6",
    "evaluate RUN --model.n_layer=3": "--model.n_layer: the run is trained already, so only "
    "these can be given: data.dir",
    "evaluate RUN --model.format=E4M3": "give the formats to round its weights to as --formats",
    "evaluate RUN --formats none --model.headroom=2": "--model.headroom: no row has a format; give "
    "--formats",
    "evaluate RUN --save fp32.yaml": "--save 'fp32.yaml' is a file; give a folder",
    "evaluate RUN --formats E4M3 --model.storage=continuous": "'continuous' does not round; "
    "allowed: master, grid",
    "evaluate e4m3 --checkpoint best": "'e4m3' is not a run's folder",
    "evaluate RUN/..": "not a run's folder; it contains: & /bfloat16, & /float, ",
    "evaluate RUN/checkpoints/step-3.safetensors": "is a checkpoint; give its run's folder and "
    "--checkpoint step-3",
    # weights of a run: reports of formats
    "evaluate RUN --out out --input x.txt": "--input needs --model PATH",
    "evaluate RUN --out out --windows 4 --formats all": "--windows needs --model PATH",
    "evaluate RUN --out out --scales row": "unknown --scales 'row'; allowed: tensor",
    "evaluate RUN --out out --formats all,none": "gaps are measured against 'none' already",
    "evaluate RUN --out out --scales channel --model.storage grid": "--model.storage can't be "
    "used with a report",
    "evaluate RUN --out out --scales channel --model.granularity block": "give --scales",
    "evaluate RUN --out out --budget nan": "--budget: 'nan' is not allowed; give a number > 0",
    "evaluate RUN --out out --budget 0": "--budget: '0' is not allowed; give a number > 0",
    "evaluate RUN --out out --scales block": "block",  # rows of 16
    "evaluate RUN --sensitivity kinds --model.formats '{\"*\": none, embeddings: none}'": "model.formats "
    "sets "
    "every "
    "layer "
    "already",
    # weights of a pretrained model
    MODEL: "needs a text; give --input FILE",
    f"{MEASURED} --data.dir OWN": "needs a text",
    f"{MEASURED} --model.block_size 128": "128 is more than the 64 positions",
    f"{MEASURED} --formats none": "leave it out",
    f"{MEASURED} --model.formats.mpl E4M3": "did you mean 'mlp'",
    f"{MEASURED} --train.max_steps 3": "can't be used with --model; allowed",
    f"{MEASURED} --sensitivity heads": "'heads' is not known",
    f"{MEASURED} e4m3.yaml": "can't be used with --model",
    f"{TUNED} --layout torchao": "--layout needs --save DIR",
    f"{TUNED} --save s --layout torchao --rule fp32 --model.format null": "--layout torchao stores "
    "quantised weights",
    f"{TUNED} --save s --layout compressed-tensors --rule stochastic --model.format E3M4": "--layout "
    "compressed-tensors: "
    "layer "
    "'model.layers.0.self_attn.q_proj' "
    "is in "
    "E3M4",
    f"{TUNED} --model.n_layer 3": "model.n_layer: 3 contradicts",
    f"{TUNED} --model.size 10M": "model.size: '10M' can't be used with model.pretrained",
    "finetune --model MODEL --data.dir OWN --model.block_size 65": "65 is more than the 64 positions",
    f"{TUNED} --model.tie_weights false": "for formats of a tied lm_head give model.tied",
    f"{TUNED} --model.formats.mlp.fc E4M3": "'mlp.fc' matches none of the 15 linear layers",
    "finetune --model MODEL --data.dir CHARS --model.block_size=16": "was prepared with tokenizer "
    "'char'",
    f"{TUNED} --eval.also CHARS": "eval.also: & is tokenized differently from",
    "sweep --sensitivity": "FILE.yaml is missing",
    # names that no file can have
    **dict.fromkeys(
        ("run LONG", "sweep NUL", "evaluate aNUL.yaml", "run /dev/null", "compare --out LONG"), ""
    ),
    **dict.fromkeys(
        (
            "report LONG --out o",
            "report NUL --out o",
            "verify LONG",
            "sweep formats.yaml --out LONG",
        ),
        "",
    ),
    "run fp32.yaml --data.dir=CHARS --name LONG": "",
    **{
        f"run fp32.yaml --data.dir=CHARS --name {name}": "--name"
        for name in ("../out", "/tmp/out", ".hidden", "..")
    },
    "run gpt2.yaml --data.dir LONG": "",
    "run gpt2.yaml --data.dir NUL": "",
    "run gpt2.yaml --model.init_from LONG": "",
    "run gpt2.yaml --model.init_from NUL": "",
}
#: options that take no empty text, which a shell makes of a variable that is not set
NEVER_EMPTY = {
    "prepare text": "--input --out --tokenizer",
    "prepare hub --dataset a/b --column text": "--config --revision --data-dir",
    "evaluate RUN": "--out --save --checkpoint --formats",
    "evaluate": "--model",
    "sample RUN": "--out --checkpoint",
    "report RUN": "--out --baseline",
    "results export RUN": "--out",
    "compare": "--out --reference --data.dir --address",
    "sweep formats.yaml": "--out --reference",
    "finetune --model MODEL": "--save --name",
}
for command, options in NEVER_EMPTY.items():
    for option in options.split():
        REFUSED[f"{command} {option} ''"] = f"{option} '' is not allowed; give a value"


@pytest.fixture(scope="session")
def pretrained(text_file):
    """A model of transformers, and the text in its tokens."""
    import causal_models

    model, own_model = (
        causal_models.write(text_file.parent / "pretrained"),
        text_file.parent / "own tokens",
    )
    assert (
        main(
            [
                "prepare",
                "text",
                "--input",
                str(text_file),
                "--tokenizer",
                str(model),
                "--out",
                str(own_model),
            ]
        )
        == 0
    )
    return {"MODEL": str(model), "OWN": str(own_model)}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_command_line_is_refused_in_one_line(
    words, refused, trained, corpus_dir, text_file, working_folder, request
):
    """The folder in which it is given stays as it was."""
    for name, text in FILES.items():
        Path(name).write_text(text)
    stand_ins = {
        "RUN": trained["float"],
        "CHARS": corpus_dir,
        "TEXT": text_file,
        "LONG": "x" * 5000,
        "NUL": "\0",
    }
    if "MODEL" in words:
        stand_ins |= request.getfixturevalue("pretrained")
    arguments = shlex.split(words)
    for word, replacement in stand_ins.items():
        arguments = [part.replace(word, str(replacement)) for part in arguments]
    message = refused(*arguments)
    assert message.isprintable()
    assert [part for part in REFUSED[words].split(" & ") if part not in message] == []
    assert {path.name for path in working_folder.iterdir()} == FILES.keys()


SOURCES = sorted(Path(nanogpt_bench.__file__).parent.rglob("*.py"))
COMMAND = re.compile(
    r"nanogpt-bench ((?:prepare|run|evaluate|sample|finetune|compare|sweep|report|results|verify) [^\n;]*)"
)
#: a word that is there in place of a number
NUMBERS = {"N": "3", "NAME": "name", "word": "./word"}


def texts(path: Path) -> Iterator[str]:
    """Every text of a module, what is put into it as a word.

    Docstrings and usages are none that is printed so.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else "word" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield node.value


def advised_commands() -> list[str]:
    """Commands that the texts of the modules name with all that they need."""
    commands = set()
    for path in SOURCES:
        for text in texts(path):
            for match in COMMAND.finditer(text):
                if not re.search(r"[\[|`]|--help|a\.yaml", match[0]):
                    commands.add(match[1])
    return sorted(commands)


ADVISED = advised_commands()


@pytest.mark.parametrize("line", ADVISED)
def test_what_is_advised_can_be_parsed(line):
    # Fewer would mean that the search of the sources misses some.
    assert len(ADVISED) > 40
    line = re.split(r" (?:writes|measures|rounds|prints) ", line)[0]
    words = [NUMBERS.get(word, word) for word in shlex.split(line)]
    parse_overrides(parse(words).overrides)


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("name", ["m", "gpt2", "with blanks"])
def test_advice_for_a_model_of_a_bare_name_or_with_blanks_works(
    text_file, corpus_dir, refused, name
):
    import causal_models

    causal_models.write(Path(name))
    message = refused(
        "finetune", "--model", name, "--data.dir", corpus_dir, "--model.block_size", "16"
    )
    advised = (
        message.partition("nanogpt-bench ")[2]
        .replace("FILE", str(text_file))
        .replace("DIR", f"'of {name}'")
    )
    assert main(shlex.split(advised)) == 0
    tuned = f"--model '{name}' --data.dir 'of {name}' --model.block_size 16 --train.max_steps 1 --eval.batches 1"
    assert main(["finetune", *shlex.split(tuned)]) == 0


def test_a_tokenizer_of_a_bare_name_is_read_and_advice_quotes_a_folder_with_blanks(
    working_folder, text_file, refused
):
    import causal_models

    causal_models.write(Path("m"))
    assert (
        main(["prepare", "text", "--input", str(text_file), "--tokenizer", "m", "--out", "bare"])
        == 0
    )
    message = refused(
        "run", "fp32.yaml", "--data.dir", working_folder / "a folder; of mine"
    )  # as a shell reads it
    advised = shlex.split(message.partition("prepare it with: nanogpt-bench ")[2])
    assert advised == ["prepare", "stdlib", "--out", str(working_folder / "a folder; of mine")]
