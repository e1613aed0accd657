"""Data sets of the Hugging Face hub: is it there, and which commit is meant."""

from __future__ import annotations

from nanogpt_bench.data.rows import read_errors
from nanogpt_bench.system.deadline import within
from nanogpt_bench.system.errors import BenchError, one_line

#: time the hub has to name a data set's commit, name resolution included
LOOKUP_SECONDS = 8.0


class NotOnHubError(BenchError):
    """The hub answered that it has no such data set."""


def find_commit(dataset: str, revision: str | None) -> str:
    """Return the commit that a revision (default: the newest) of a data set stands for.

    It is one request without retries, so that a hub out of reach is known within seconds.

    Raises:
        BenchError: out of reach, no such data set or revision, or a data set that needs a login.
    """
    from huggingface_hub import HfApi, errors

    def look_up() -> str:
        return str(HfApi().dataset_info(dataset, revision=revision, timeout=LOOKUP_SECONDS).sha)

    try:
        return within(LOOKUP_SECONDS, look_up)
    except errors.RevisionNotFoundError:
        raise BenchError(f"data set {dataset!r} has no revision {revision!r}; leave --revision out for main") from None
    except errors.GatedRepoError:
        raise BenchError(f"data set {dataset!r} has to be asked for on the hub, then: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise NotOnHubError(f"the hub has no data set {dataset!r}") from None
    except errors.HFValidationError as error:
        raise BenchError(f"--dataset {dataset!r} is no id of a data set: {one_line(error)}") from None
    except read_errors() as error:
        raise _out_of_reach(dataset, error) from None


def _out_of_reach(dataset: str, error: Exception) -> BenchError:
    reason = one_line(error) or type(error).__name__
    return BenchError(
        f"the Hugging Face hub can't be reached ({reason}); give a local copy of {dataset!r} with --data-dir DIR, "
        "or prepare a text that needs no network: nanogpt-bench prepare stdlib"
    )
