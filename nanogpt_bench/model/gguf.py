"""Tensors of a GGUF file that transformers leaves out: what computes with them is another model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_bench.system.errors import BenchError

#: factors of the rotary frequencies, which change nothing where all of them are 1
_FACTORS = "rope_freqs.weight"


def check_taken(model: Any, path: Path, unexpected: Iterable[str]) -> list[str]:
    """Return the names of a file's tensors that `model` was read without, and that change nothing.

    Args:
        model: what transformers made of the file.
        path: of the file.
        unexpected: names that transformers itself has called so.

    Raises:
        BenchError: a tensor that was left out and counts, named.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    left = sorted({*unexpected, *_left_out(model, reader)})
    for name in left:
        if not name.endswith(_FACTORS):
            raise BenchError(f"model {str(path)!r}: unexpected weight {name!r}, which transformers leaves out")
    for tensor in reader.tensors if left else ():
        if tensor.name.endswith(_FACTORS) and not bool(np.all(tensor.data == 1)):
            raise BenchError(
                f"model {str(path)!r}: {tensor.name!r} scales rotary frequencies by up to {tensor.data.max():g}, and "
                "transformers leaves it out: give the folder that the file was made from"
            )
    return left


def _left_out(model: Any, reader: Any) -> list[str]:
    """The names that transformers' reader of most architectures passes over without a word."""
    try:
        from transformers import modeling_gguf_pytorch_utils as theirs
    except ImportError:  # a release in which every architecture's tensors are accounted for
        return []
    kind = theirs.read_field(reader, "general.architecture")[0]
    if _accounts_for(kind):
        return []
    processor = theirs.TENSOR_PROCESSORS.get(kind, theirs.TensorProcessor)(config={})
    taken = theirs.get_gguf_hf_weights_map(model, processor)
    names = [str(tensor.name) for tensor in reader.tensors]
    return [name for name in names if name not in taken and name.removesuffix(".weight") not in taken]


def _accounts_for(kind: str) -> bool:
    """Whether transformers reads an architecture in the way that calls what it leaves out unexpected."""
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:
        return False
    return bool(is_gguf_arch_supported(kind))
