"""Checks of a model that transformers has read: no codes taken for weights, the right
head, finite values, causal.
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
    """Refuse files that have codes in place of weights: transformers would read them as
    numbers.
    """
    if getattr(model, "hf_quantizer", None) is not None:  # the quantiser has checked the files
        return
    folder = (
        Path(name) if Path(name).is_dir() else hub_file(name, "config.json", asked="model").parent
    )
    whole = folder / "model.safetensors"
    with refusals(f"model {name!r}", ValueError):
        fm.huggingface.check_floats(model, whole if whole.is_file() else folder)


def check_size(settings: Any, name: str) -> None:
    """Refuse a folder whose config.json describes more weights than its files have
    bytes, before a model is made.
    """
    least = settings.hidden_size * (
        settings.vocab_size + settings.num_hidden_layers
    )  # embedding, and a norm per block
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    size = sum(file.stat().st_size for file in files)
    if files and least > size:
        raise BenchError(
            f"model {name!r}: its config.json needs {least:,} weights or more, its .safetensors "
            f"have {size:,} bytes"
        )


def shares_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def check_head(model: Any, planned: Any, name: str) -> None:
    """Refuse a model whose head is tied where that of `planned`, made from config.json,
    is not, or the reverse.
    """
    shared = shares_head(model)
    if shares_head(planned) != shared:
        raise BenchError(
            f"model {name!r} has {'no' if shared else 'a'} head of its own, and its config.json "
            f"says otherwise; set tie_word_embeddings to {str(shared).lower()} there"
        )


@torch.no_grad()
def check_finite(model: nn.Module, name: str) -> None:
    """Refuse weights that are not finite: they can be neither measured nor trained."""
    for weight, parameter in model.named_parameters():
        bad = parameter.numel() - int(parameter.isfinite().sum())
        if bad:
            raise BenchError(
                f"model {name!r}: {weight} holds NaN or infinity in {bad:,} of its "
                f"{parameter.numel():,} values; give "
                "a model of finite weights"
            )


@torch.no_grad()
def check_causal(model: Any, name: str) -> None:
    """Refuse a model whose logits depend on later tokens: it would predict tokens that
    it sees.
    """
    tokens = torch.zeros(2, 4, dtype=torch.long)
    tokens[1, -1] = 1
    one, other = model.eval()(input_ids=tokens).logits[:, :-1]
    if not bool(one.isfinite().all() and other.isfinite().all()):
        raise BenchError(
            f"model {name!r}: its logits are not finite in float32, though its weights are"
        )
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-4):
        raise BenchError(
            f"model {name!r} reads the tokens that follow: it is an encoder, no causal language "
            f"model"
        )


#: factors of the rotary frequencies; without effect if all are 1
_FACTORS = "rope_freqs.weight"


def check_taken(model: Any, path: Path, unexpected: Iterable[str]) -> list[str]:
    """Return the tensors of a GGUF file that transformers leaves out; refuse them
    unless they have no effect.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    left = sorted({*unexpected, *_left_out(model, reader)})
    for name in left:
        if not name.endswith(_FACTORS):
            raise BenchError(
                f"model {str(path)!r}: unexpected weight {name!r}, which transformers leaves out"
            )
    for tensor in reader.tensors if left else ():
        if tensor.name.endswith(_FACTORS) and not bool(np.all(tensor.data == 1)):
            raise BenchError(
                f"model {str(path)!r}: {tensor.name!r} scales rotary frequencies by up to "
                f"{tensor.data.max():g}, and "
                "transformers leaves it out: give the folder that the file was made from"
            )
    return left


def _left_out(model: Any, reader: Any) -> list[str]:
    """The names of tensors that transformers leaves out without listing them as
    unexpected.
    """
    try:
        from transformers import modeling_gguf_pytorch_utils as theirs
    except ImportError:  # a release that lists the unexpected tensors of all architectures
        return []
    kind = theirs.read_field(reader, "general.architecture")[0]
    with suppress(ImportError):  # a release that lists the unexpected tensors of some architectures
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(kind):
            return []
    processor = theirs.TENSOR_PROCESSORS.get(kind, theirs.TensorProcessor)(config={})
    taken = theirs.get_gguf_hf_weights_map(model, processor)
    names = [str(tensor.name) for tensor in reader.tensors]
    return [
        name for name in names if name not in taken and name.removesuffix(".weight") not in taken
    ]
