"""Checks of a model that transformers has read.

It has weights and not codes, the right head and finite values, and it is causal.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.system.errors import BenchError, refusals
from nanogpt_bench.system.hub import hub_file


def check_floats(model: Any, name: str) -> None:
    """Refuse files that have codes in place of weights.

    transformers would read them as numbers.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = hub_file(name, "config.json", asked="model").parent
    single_file = folder / "model.safetensors"
    with refusals(f"model {name!r}", ValueError):
        fm.files.check_floats(model, single_file if single_file.is_file() else folder)


def check_size(settings: Any, name: str) -> None:
    """Refuse a folder whose config.json needs more weights than its files have bytes.

    It is refused before a model is made.
    """
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    # An embedding, and a norm per block. Every weight is taken to need a byte or more.
    rows = settings.vocab_size + settings.num_hidden_layers
    fewest_weights = settings.hidden_size * rows
    for file in files:
        if not file.exists():
            raise BenchError(f"model {name!r} can't be read: {file.name} is a broken link")
    size = sum(file.stat().st_size for file in files)
    if files and fewest_weights > size:
        raise BenchError(
            f"model {name!r}: its config.json describes {fewest_weights:,} weights or more, but "
            f"its .safetensors have {size:,} bytes"
        )


def shares_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def check_head(model: Any, planned: Any, name: str) -> None:
    """Refuse a model whose head is tied where that of `planned` is not, or the reverse.

    `planned` is made from config.json.
    """
    shared = shares_head(model)
    if shares_head(planned) != shared:
        raise BenchError(
            f"model {name!r} has {'no' if shared else 'an'} output layer of its own, but its "
            f"config.json says otherwise; set tie_word_embeddings to {str(shared).lower()} there"
        )


@torch.no_grad()
def check_finite(model: nn.Module, name: str) -> None:
    """Refuse weights that are not finite: they can be neither measured nor trained."""
    for weight, parameter in model.named_parameters():
        bad = parameter.numel() - int(parameter.isfinite().sum())
        if bad:
            raise BenchError(
                f"model {name!r}: {weight} has {bad:,} NaN or Inf among its {parameter.numel():,} "
                "values; give a model with finite weights"
            )


@torch.no_grad()
def check_causal(model: Any, name: str) -> None:
    """Refuse a model whose logits depend on later tokens.

    It would predict tokens that it sees.
    """
    # Two sequences that differ in their last token.
    tokens = torch.zeros(2, 4, dtype=torch.long)
    tokens[1, -1] = 1
    first, second = model.eval()(input_ids=tokens).logits[:, :-1]
    if not bool(first.isfinite().all() and second.isfinite().all()):
        raise BenchError(
            f"model {name!r}: its weights are finite, but its logits in float32 are not"
        )
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise BenchError(
            f"model {name!r} reads the tokens that follow, so it is not a causal language model"
        )


#: factors of the rotary frequencies; without effect if all are 1
_FACTORS = "rope_freqs.weight"


def check_unread_tensors(model: Any, path: Path, unexpected: Iterable[str]) -> list[str]:
    """Return the tensors of a GGUF file that transformers leaves out.

    They are refused unless they have no effect.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    unread = sorted({*unexpected, *_unlisted_tensors(model, reader)})
    for name in unread:
        if not name.endswith(_FACTORS):
            raise BenchError(
                f"model {str(path)!r} has the weight {name!r}, which transformers does not read"
            )
    if unread:
        _check_factors(reader, path)
    return unread


def _check_factors(reader: Any, path: Path) -> None:
    for tensor in reader.tensors:
        if tensor.name.endswith(_FACTORS) and not bool(np.all(tensor.data == 1)):
            raise BenchError(
                f"model {str(path)!r}: {tensor.name!r} scales rotary frequencies by up to "
                f"{tensor.data.max():g}, but transformers does not read it; give the folder that "
                "the file was made from"
            )


def _unlisted_tensors(model: Any, reader: Any) -> list[str]:
    """Return tensors that transformers leaves out but does not list as unexpected."""
    try:
        from transformers import modeling_gguf_pytorch_utils as gguf_utils
    except ImportError:
        # Releases without this module list the unexpected tensors of all architectures.
        return []
    kind = gguf_utils.read_field(reader, "general.architecture")[0]
    # Releases without this function list the unexpected tensors of no architecture.
    with suppress(ImportError):
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(kind):
            return []
    processor = gguf_utils.TENSOR_PROCESSORS.get(kind, gguf_utils.TensorProcessor)(config={})
    read_names = gguf_utils.get_gguf_hf_weights_map(model, processor)
    unlisted = []
    for tensor in reader.tensors:
        name = str(tensor.name)
        if name not in read_names and name.removesuffix(".weight") not in read_names:
            unlisted.append(name)
    return unlisted
