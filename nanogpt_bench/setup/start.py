"""`model.init_from`: training that starts from the weights of a GPT-2 checkpoint or of
a run.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import read_sum
from nanogpt_bench.checkpoint.format import check_layout, step_file, steps
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.data.batches import Corpus, digests_of, label_names, open_corpus
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


def pinned(name: str) -> str:
    """Return the newest checkpoint in place of a run's folder, and any other name as it
    is.
    """
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
                f"{KEY}: {name!r} is of task 'classify'; give a run of task 'language'"
            )
        return shape
    if _names_a_checkpoint(path):
        check_layout(path.parent.parent)
        found = [str(step_file(path.parent.parent, step)) for step in steps(path.parent.parent)]
        others = "checkpoints" + (f": {', '.join(found)}" if found else "")
        raise BenchError(
            f"{KEY}: {name!r} does not exist; give a run's folder, or one of its {others}"
        )
    with refusals(KEY):
        return checkpoint_shape(name)


def _names_a_checkpoint(path: Path) -> bool:
    return path.parent.name == "checkpoints" and path.name.startswith("step-")


def start_facts(config: Config) -> dict[str, Any]:
    """Return what environment.json records of the checkpoint that training starts from;
    empty where it is no run's.
    """
    path = Path(config.model.init_from or "")
    if not config.model.init_from or not is_checkpoint(path):
        return {}
    with refusals(KEY):
        return {"init_from": {"checkpoint": str(path), "sha256": read_sum(path)}}


def start_model(shape: GPTShape, config: Config, corpus: Corpus) -> Any:
    """Return the float model of a shape with the weights that a resolved configuration
    starts from.
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
    model = build_model(
        shape, seed
    )  # a classifier: the language model's body, and a head with random weights
    body = {
        name: value
        for name, value in language.state_dict().items()
        if not name.startswith("lm_head.")
    }
    model.load_state_dict({**model.state_dict(), **body})
    return model


def check_text(trained: Trained, corpus: Corpus, called: str) -> None:
    """Refuse a text whose tokens are not those that the weights were trained on."""
    theirs, ours = trained.environment.get("tokenizer"), corpus.meta["tokenizer"]
    if theirs is not None and theirs != ours:
        raise BenchError(
            f"{called} was trained on text of tokenizer {theirs!r}, {str(corpus.folder)!r} is of "
            f"{ours!r}"
        )
    facts: Any = trained.environment.get("corpus")
    names = facts.get("labels") if isinstance(facts, dict) else None
    if trained.config.task == "classify" and names not in (None, label_names(corpus)):
        raise BenchError(
            f"{called} was trained on other labels than those of {str(corpus.folder)!r}"
        )
    if ours.startswith(("char", "bpe-")) and not same_text(trained, corpus):
        raise BenchError(
            f"{called} was trained on another text than {str(corpus.folder)!r}, and tokenizer "
            f"{ours!r} numbers the "
            "tokens of each text on its own; give the run's own with --data.dir"
        )
    rows = (
        trained.tensors["token_embedding.weight"].shape[0] if trained.tensors else corpus.vocab_size
    )
    if rows != corpus.vocab_size:
        raise BenchError(
            f"{called} has a vocabulary of {rows}, {str(corpus.folder)!r} one of "
            f"{corpus.vocab_size}"
        )


def same_text(trained: Trained, corpus: Corpus) -> bool:
    """Return whether a corpus is the one that a run was trained on, by the SHA-256 of
    its splits and labels.
    """
    facts: Any = trained.environment.get("corpus")
    return digests_of(facts.get("splits") if isinstance(facts, dict) else None) == digests_of(
        corpus.meta["splits"]
    )


def as_begun(config: Config, saved: Config, run_dir: Path) -> tuple[Config, GPTShape | None]:
    """Return the settings to resume a run that started from another one, and the
    model's shape where needed.

    `saved` are the settings in the run's config.yaml.

    A run's folder in `model.init_from` means the checkpoint that was its newest when
    this run began. Where that checkpoint is gone, this run's own checkpoints have the
    weights, and `saved` has the shape.
    """
    name = config.model.init_from
    if not name:
        return config, None
    begun = Path(saved.model.init_from or "")
    if not _names_a_checkpoint(begun) or Path(name) not in (begun, begun.parent.parent):
        return config, None
    config = copy.deepcopy(config)
    config.model.init_from = saved.model.init_from
    if is_checkpoint(begun) or not steps(run_dir):
        return config, None
    return config, model_shape(saved, open_corpus(saved))


def check_start(config: Resolved, found: object) -> None:
    """Refuse a run without a checkpoint whose starting weights are gone."""
    if found is None and config.initial_shape is not None:
        raise BenchError(
            f"{KEY}: {config.model.init_from!r} does not exist any more, and there is no whole "
            f"checkpoint"
        )
