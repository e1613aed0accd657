"""Write the folders under `tests/stored`.

Every later version has to read them, or to refuse them by name.

    python tests/stored_folders.py tests/stored/NAME

Run it in the version whose files are to be kept; NAME says which. `test_stored_folders.py`
reads all of them. Files are small: a Llama of one layer, and a run of six steps.
"""

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8manifold as fm

TOKENS = torch.arange(12).view(2, 6)
TEXT = "the quick brown fox jumps over the lazy dog\n" * 100
RUN_SETTINGS = {
    "data.dir": "corpus",
    "model.n_layer": 1,
    "model.n_head": 1,
    "model.n_embd": 16,
    "model.block_size": 8,
    "model.format": "E4M3",
    "optimizer.name": "stiffness_adamw",
    "train.batch_size": 4,
    "eval.batches": 2,
    "eval.interval": 6,
    "monitor.interval": 6,
    "optimizer.warmup_steps": 2,
}


def small_llama() -> nn.Module:
    """Return a Llama of one layer with the same weights on every machine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel()).view(parameter.shape)
            # Whole numbers from -15 to 15 over 64: float32 has them exactly.
            parameter.copy_(((ramp * 7 + number) % 31 - 15) / 64)
    return model.train()


def decoded_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by name in float32, as the model computes with them."""
    for name, parameter in model.named_parameters():
        is_in_codes = isinstance(parameter, fm.FP8Tensor)
        values = parameter.dequantize() if is_in_codes else parameter.detach()
        yield name, values.float()


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all weights in float32, in the order of their names."""
    digest = hashlib.sha256()
    for name, values in sorted(decoded_weights(model)):
        digest.update(name.encode())
        digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_saved(folder: Path, layout: str) -> dict[str, str]:
    """Save a model in codes in one of the library's layouts, and its optimizer's state.

    Earlier versions had another form, which their folders have as ``attached``.
    """
    model = fm.quantize_model(small_llama(), {"*": "E4M3"}, storage="codes")
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2, moments="8bit")
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, 0.5)
        optimizer.step()
    fm.save(model, folder, layout)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, object] = {}
    for number, entries in optimizer.state_dict()["state"].items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{entry}"] = value.contiguous()
            else:
                plain[f"{number}.{entry}"] = value
    state_folder = folder / "optimizer"
    state_folder.mkdir()
    save_file(tensors, state_folder / "optimizer.safetensors")
    text = json.dumps(plain, indent=1) + "\n"
    (state_folder / "optimizer.json").write_text(text, encoding="utf-8")
    return {"weights": digest_of(model)}


def write_published(folder: Path) -> dict[str, str]:
    """Export squares of FP8 in the layout of DeepSeek."""
    model = fm.quantize_model(small_llama(), {"*": "E4M3"}, storage="codes", granularity="square")
    fm.save(model, folder, "fp8")
    return {"weights": digest_of(model)}


def prepare_corpus(folder: Path) -> None:
    """Prepare the text of the run as ``corpus`` in a folder."""
    from nanogpt_bench.cli import main

    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    with contextlib.chdir(folder):
        words = ["--input", "text.txt", "--tokenizer", "char", "--out", "corpus"]
        assert main(["prepare", "text", *words]) == 0


def train(folder: Path, max_steps: int, *flags_of_resume: str) -> None:
    """Train the run of `RUN_SETTINGS` in a folder that has its corpus."""
    from nanogpt_bench.cli import main

    (folder / "small.yaml").write_text("seed: 1\n", encoding="utf-8")
    settings = {**RUN_SETTINGS, "train.max_steps": max_steps}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    with contextlib.chdir(folder):
        assert main(["run", "small.yaml", "--name", "run", *flags, *flags_of_resume]) == 0


def write_run(folder: Path) -> dict[str, float]:
    """Train six steps with the bench, and keep the run with its checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        prepare_corpus(work)
        train(work, 6)
        # What describes the machine is of no use to another one.
        of_machine = shutil.ignore_patterns("environment.json", "SHA256SUMS", "*.html")
        shutil.copytree(work / "runs" / "run", folder, ignore=of_machine)
        train(work, 8, "--resume", "--allow-config-change")
        summary = json.loads((work / "runs" / "run" / "summary.json").read_text())
    return {"loss_after_eight_steps": summary["final_val_loss"]}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    root.mkdir(parents=True)
    facts = {
        "floats": write_saved(root / "floats", "floats"),
        "codes": write_saved(root / "codes", "codes"),
        "published": write_published(root / "published"),
        "run": write_run(root / "run"),
    }
    (root / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
