"""`model.init_from`: training that starts from a GPT-2 checkpoint or from a run.

A run's folder means its newest checkpoint. config.yaml names that checkpoint, so that a
resumed run starts from the same weights although the other run has gone on since
(`resumed_settings`).
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import read_sum
from nanogpt_bench.checkpoint.format import refuse_checkpoint_folders, step_file, steps
from nanogpt_bench.config.schema import Config, Task
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, digests_of, label_names, open_corpus
from nanogpt_bench.data.tokenizer_kind import OF_ONE_TEXT, stored_kind
from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.model.weights import checkpoint_shape, load_checkpoint
from nanogpt_bench.runs.trained import (
    Trained,
    choose,
    fill_floats,
    is_checkpoint,
    is_run,
    load,
    trained_shape,
)
from nanogpt_bench.setup.task import model_shape
from nanogpt_bench.system.errors import BenchError, refusals

KEY = "model.init_from"


def newest_checkpoint(name: str) -> str:
    """Return the newest checkpoint of a run's folder, and any other name as it is."""
    path = Path(name)
    if is_checkpoint(path) or not is_run(path):
        return name
    with refusals(KEY):
        return str(choose(path))


def start_shape(name: str) -> GPTShape:
    """Return the shape of the model whose weights are called `name`."""
    path = Path(name)
    if is_checkpoint(path):
        with refusals(KEY):
            shape = trained_shape(path)
        if shape.labels:
            raise BenchError(
                f"{KEY}: {name!r} was trained with task 'classify'; give a run with task 'language'"
            )
        return shape
    if _names_a_checkpoint(path):
        run_dir = path.parent.parent
        refuse_checkpoint_folders(run_dir)
        checkpoints = [str(step_file(run_dir, step)) for step in steps(run_dir)]
        listed = f": {', '.join(checkpoints)}" if checkpoints else ""
        raise BenchError(
            f"{KEY}: {name!r} does not exist; give a run's folder, or one of its "
            f"checkpoints{listed}"
        )
    with refusals(KEY):
        return checkpoint_shape(name)


def _names_a_checkpoint(path: Path) -> bool:
    return path.parent.name == "checkpoints" and path.name.startswith("step-")


def start_facts(config: Config) -> dict[str, Any]:
    """Return what environment.json records of the checkpoint that training starts from.

    Empty where it is no run's.
    """
    path = Path(config.model.init_from or "")
    if not config.model.init_from or not is_checkpoint(path):
        return {}
    with refusals(KEY):
        return {"init_from": {"checkpoint": str(path), "sha256": read_sum(path)}}


def start_model(shape: GPTShape, config: Config, corpus: Corpus) -> Any:
    """Return the float model of a shape with the weights that a run starts from.

    The configuration is resolved. A classifier gets the language model's body, and a
    head with random weights.
    """
    name, seed = config.model.init_from or "", config.seed
    trained = None
    if is_checkpoint(Path(name)):
        with refusals(KEY):
            trained = load(Path(name))
        check_text(trained, corpus, f"{KEY}: {name!r}")
    language = build_model(replace(shape, labels=0), seed)
    if trained is not None:
        fill_floats(language, trained, f"{KEY}: {name!r}")
    else:
        with refusals(KEY):
            load_checkpoint(language, name, str(corpus.meta["tokenizer"]))
    if not shape.labels:
        return language
    classifier = build_model(shape, seed)
    state = dict(classifier.state_dict())
    for weight, value in language.state_dict().items():
        if not weight.startswith("lm_head."):
            state[weight] = value
    classifier.load_state_dict(state)
    return classifier


def check_text(trained: Trained, corpus: Corpus, source: str) -> None:
    """Refuse a text whose tokens are not those that the weights were trained on."""
    folder = str(corpus.folder)
    trained_tokenizer = trained.environment.get("tokenizer")
    tokenizer = corpus.meta["tokenizer"]
    if trained_tokenizer is not None and trained_tokenizer != tokenizer:
        raise BenchError(
            f"{source} was trained with tokenizer {trained_tokenizer!r}, but {folder!r} was "
            f"prepared with {tokenizer!r}"
        )
    facts: Any = trained.environment.get("corpus")
    labels = facts.get("labels") if isinstance(facts, dict) else None
    if trained.config.task == Task.CLASSIFY and labels not in (None, label_names(corpus)):
        raise BenchError(f"{source} was trained on other labels than {folder!r} has")
    if stored_kind(tokenizer) in OF_ONE_TEXT and not same_text(trained, corpus):
        raise BenchError(
            f"{source} was trained on another text than {folder!r}, and tokenizer {tokenizer!r} "
            "numbers tokens differently for each text; give the run's own text with --data.dir"
        )
    rows = corpus.vocab_size
    if trained.tensors:
        rows = trained.tensors["token_embedding.weight"].shape[0]
    if rows != corpus.vocab_size:
        raise BenchError(
            f"{source} has a vocabulary of {rows}, but {folder!r} has {corpus.vocab_size}"
        )


def same_text(trained: Trained, corpus: Corpus) -> bool:
    """Return whether a corpus is the one that a run was trained on.

    It is judged by the SHA-256 of splits and labels.
    """
    facts: Any = trained.environment.get("corpus")
    splits = facts.get("splits") if isinstance(facts, dict) else None
    return digests_of(splits) == digests_of(corpus.meta["splits"])


def resumed_settings(
    config: Config, saved: Config, run_dir: Path
) -> tuple[Config, GPTShape | None]:
    """Return the settings to resume a run that started from another one.

    With them the model's shape, where it is needed. `saved` are the settings in the
    run's config.yaml.

    A run's folder in `model.init_from` means the checkpoint that was its newest when
    this run began. Where that checkpoint is gone, this run's own checkpoints have the
    weights, and `saved` has the shape.
    """
    name = config.model.init_from
    if not name:
        return config, None
    checkpoint = Path(saved.model.init_from or "")
    same_source = Path(name) in (checkpoint, checkpoint.parent.parent)
    if not _names_a_checkpoint(checkpoint) or not same_source:
        return config, None
    config = copy.deepcopy(config)
    config.model.init_from = saved.model.init_from
    if is_checkpoint(checkpoint) or not steps(run_dir):
        return config, None
    return config, model_shape(saved, open_corpus(saved))


def check_start(config: Resolved, checkpoint: object) -> None:
    """Refuse to begin a run at step 0 when the weights that it starts from are gone."""
    if checkpoint is None and config.initial_shape is not None:
        raise BenchError(
            f"{KEY}: {config.model.init_from!r} no longer exists, and this run has no complete "
            "checkpoint"
        )
