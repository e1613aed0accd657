"""Files from the Hugging Face hub: out of the local cache where they are there, and an answer in seconds where not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from nanogpt_bench.system.errors import BenchError, one_line

#: seconds that the hub has to answer before it counts as out of reach; its client alone tries for 23 s
PATIENCE = 8.0
T = TypeVar("T")


def hub_file(repository: str, name: str, asked: str = "model.init_from:") -> Path:
    """Return the path of a model repository's file in the local cache, fetched where it is not there yet.

    An error begins with what was `asked`.

    Raises:
        BenchError: no such repository or file, the hub is out of reach, or its client is not installed.
    """
    if find_spec("huggingface_hub") is None:
        raise BenchError(
            f"{asked} {repository!r} is no folder here, and the hub needs huggingface_hub; "
            "get it with pip install 'fp8manifold[hub]'"
        )
    return _cached(repository, name, asked) or _fetched(repository, name, asked)


def _cached(repository: str, name: str, asked: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, name)
    except HFValidationError as error:
        raise BenchError(f"{asked} {one_line(error)}") from None
    return Path(path) if isinstance(path, str) else None


def _fetched(repository: str, name: str, asked: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # every retry would be a line of its own
    try:
        within(PATIENCE, lambda: get_hf_file_metadata(hf_hub_url(repository, name), timeout=PATIENCE))
        return Path(hf_hub_download(repository, name))
    except GatedRepoError:
        raise BenchError(f"{asked} {repository!r} on the hub asks for an account with access") from None
    except RepositoryNotFoundError:
        raise BenchError(f"{asked} {repository!r} is neither a folder here nor a model on the hub") from None
    except EntryNotFoundError:
        raise BenchError(f"{asked} {repository!r} on the hub has no {name}") from None
    except Exception as error:  # the client lets builtin and its transport's own errors through
        raise BenchError(
            f"{asked} the hub is out of reach for {repository!r} ({type(error).__name__}: {one_line(error)}); "
            "give the folder of a local copy with config.json and model.safetensors"
        ) from None


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return `call()`, or raise TimeoutError after `seconds`, if any; what the call raises is raised here.

    The call goes on in a daemon thread when time is up or a signal interrupts the waiting, so it must not hold anything
    that has to be closed.

    >>> within(5.0, lambda: 2 + 2)
    4
    """
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((True, call()))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        done, value = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not done:
        raise value
    result: T = value
    return result
