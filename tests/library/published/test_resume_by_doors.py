"""Training of what `fm.load` returns goes on to the bit, whoever carries the checkpoint."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_folders import make
from hf_cases import llama, numbers_tokenizer
from optimizer_cases import frozen
from surgery_models import model_bits
from torch import nn

import fp8manifold as fm

#: what other libraries announce is their own business
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, HALF = 6, 3
SOURCES = ["floats", "floats of ours", "codes of ours", "rows", "squares, experts"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    paths = {name: root / name.replace(" ", "-") for name in SOURCES}
    for name in ("rows", "squares, experts"):
        make(name, paths[name])
    llama().save_pretrained(paths["floats"])
    model = fm.quantize_model(llama(), {"*": "E4M3"}, embeddings="E4M3", tied="leave")
    fm.save(model, paths["floats of ours"])
    fm.save(model, paths["codes of ours"], "codes")
    return paths


def read(name: str, folders: dict[str, Path]) -> Any:
    formats = {"*": "E4M3"} if name == "floats" else None
    options = {"tied": "leave"} if name == "floats" else {}
    return fm.load(folders[name], formats, **options).train()


def optimizer_of(model: nn.Module) -> Any:
    return fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2, moments="8bit")


def loss_of(model: Any, step: int) -> Any:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
    return model(input_ids=tokens, labels=tokens).loss


def steps(model: Any, optimizer: Any, first: int, end: int) -> None:
    for step in range(first, end):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_torch(path: Path, model: Any, optimizer: Any, *, saves: bool) -> None:
    if saves:
        torch.save([model.state_dict(), optimizer.state_dict()], path)
        return
    of_model, of_optimizer = torch.load(path, weights_only=True)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)


def by_safetensors(path: Path, model: Any, optimizer: Any, *, saves: bool) -> None:
    from safetensors.torch import load_model, save_model

    if saves:
        save_model(model, str(path))
        torch.save(optimizer.state_dict(), f"{path}.pt")
        return
    load_model(model, path)
    optimizer.load_state_dict(torch.load(f"{path}.pt", weights_only=True))


def by_dcp(path: Path, model: Any, optimizer: Any, *, saves: bool) -> None:
    """By torch's distributed checkpoint in one process, which reads into what is there."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if saves:
        checkpoint.save(state, checkpoint_id=path, no_dist=True)
        return
    checkpoint.load(state, checkpoint_id=path, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


@pytest.mark.parametrize("carry", [by_torch, by_safetensors, by_dcp])
@pytest.mark.parametrize("name", SOURCES)
def test_a_loop_of_ones_own_goes_on(
    name: str, carry: Callable[..., None], folders: dict[str, Path], tmp_path: Path
) -> None:
    whole, again = read(name, folders), read(name, folders)
    optimizer, other_optimizer = optimizer_of(whole), optimizer_of(again)
    steps(whole, optimizer, 0, HALF)
    carry(tmp_path / "half", whole, optimizer, saves=True)
    steps(whole, optimizer, HALF, STEPS)
    carry(tmp_path / "half", again, other_optimizer, saves=False)
    steps(again, other_optimizer, HALF, STEPS)
    assert model_bits(again) == model_bits(whole) != model_bits(read(name, folders))
    # torch's distributed checkpoint knows of these two parts, and of no counts beside them
    for part in ("state", "param_groups"):
        assert frozen(other_optimizer.state_dict()[part]) == frozen(optimizer.state_dict()[part])


@pytest.mark.extra("lightning")
@pytest.mark.parametrize("name", SOURCES)
def test_lightning_goes_on(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import lightning

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = read(name, folders)

        def training_step(self, batch: Any) -> Any:
            return loss_of(self.model, int(batch))

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model)

    def fitted(module: Any, epochs: int, checkpoint: Path | None = None) -> Any:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        batches = torch.utils.data.DataLoader(range(HALF), batch_size=1)
        trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=True)
        return trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    whole, half, again = Trained(), Trained(), Trained()
    ended = fitted(whole, 2)
    fitted(half, 1).save_checkpoint(tmp_path / "half.ckpt")
    resumed = fitted(again, 2, tmp_path / "half.ckpt")
    assert model_bits(again.model) == model_bits(whole.model) != model_bits(half.model)
    states = [trainer.optimizers[0].state_dict() for trainer in (ended, resumed)]
    assert frozen(states[0]) == frozen(states[1])


@pytest.mark.extra("trl", "datasets")
@pytest.mark.parametrize("name", ["floats of ours", "rows"])
def test_sft_goes_on(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    import datasets
    import trl

    data = datasets.Dataset.from_list(
        [{"input_ids": [(start + i) % 30 for i in range(8)]} for start in range(24)]
    )

    def trained(folder: Path, resume: Path | None = None) -> Any:
        model = read(name, folders)
        arguments = trl.SFTConfig(
            str(folder),
            max_steps=STEPS,
            save_steps=HALF,
            max_length=8,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=data,
            processing_class=numbers_tokenizer(),
            optimizer_cls_and_kwargs=fm.huggingface.trainer_optimizer(arguments, moments="8bit"),
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return model

    whole = trained(tmp_path / "whole")
    again = trained(tmp_path / "cut", tmp_path / "whole" / f"checkpoint-{HALF}")
    assert model_bits(again) == model_bits(whole) != model_bits(read(name, folders))
