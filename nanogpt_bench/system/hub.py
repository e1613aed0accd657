"""Files from the Hugging Face hub.

A file comes from the local cache if it is there, else it is downloaded, or refused in
seconds.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from nanogpt_bench.system.errors import BenchError, one_line

#: seconds without an answer after which the hub counts as out of reach
PATIENCE = 8.0
T = TypeVar("T")


def hub_file(repository: str, name: str, asked: str = "model.init_from:") -> Path:
    """Return the path of a model repository's file in the local cache.

    It is downloaded if missing. `asked` begins errors.
    """
    if find_spec("huggingface_hub") is None:
        raise BenchError(
            f"{asked} {repository!r} is not a folder here, and looking it up on the hub needs "
            "huggingface_hub; get it with pip install 'fp8manifold[hub]'"
        )
    from huggingface_hub import HfApi, errors, hf_hub_download

    try:
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            return Path(hf_hub_download(repository, name, local_files_only=True))
        # The download itself would try for longer.
        HfApi().model_info(repository, timeout=PATIENCE)
        return Path(hf_hub_download(repository, name))
    except errors.HFValidationError as error:
        raise BenchError(f"{asked} {one_line(error)}") from None
    except errors.GatedRepoError:
        raise BenchError(
            f"{asked} {repository!r} on the hub is gated; ask for access on its page, then: hf "
            "auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise BenchError(
            f"{asked} {repository!r} is neither a folder here nor a model on the hub"
        ) from None
    except errors.RemoteEntryNotFoundError:
        raise BenchError(f"{asked} {repository!r} on the hub has no {name}") from None
    except Exception as error:
        # The client lets errors of Python and of its transport through.
        raise BenchError(
            f"{asked} the hub can't be reached for {repository!r} ({type(error).__name__}: "
            f"{one_line(error)}); give the folder of a local copy with config.json and "
            "model.safetensors"
        ) from None


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return `call()`, or raise its error, or TimeoutError after `seconds`.

    None waits for ever. When time is up or a signal interrupts, the call goes on in a
    daemon thread: let it hold nothing to close.
    """
    results: queue.SimpleQueue[T] = queue.SimpleQueue()
    errors: list[BaseException] = []
    finished = threading.Event()

    def work() -> None:
        try:
            results.put(call())
        except BaseException as error:
            errors.append(error)
        finished.set()

    threading.Thread(target=work, daemon=True).start()
    if not finished.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results.get()
