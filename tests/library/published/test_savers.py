"""Savers of other libraries: what they write of a model with codes comes back, or is
refused.
"""

from typing import Any

import pytest
import torch
from hf_cases import llama
from safetensors import torch as safetensors
from torch import nn

import fp8manifold as fm
from fp8manifold import quantize_model
from fp8manifold._doors import quantizer

pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 8), nn.Linear(8, 2))


def in_codes() -> Any:
    return quantize_model(network(), "E4M3", embeddings="E5M2")


def outputs(model: Any) -> Any:
    return model(torch.arange(6)).detach()


def read_by_torch(model: Any, folder: Any) -> None:
    model.load_state_dict(safetensors.load_file(folder / "model.safetensors"), strict=False)


def read_by_safetensors(model: Any, folder: Any) -> None:
    safetensors.load_model(model, folder / "model.safetensors", strict=False)


def read_by_accelerate(model: Any, folder: Any) -> None:
    import accelerate

    accelerate.load_checkpoint_in_model(model, folder)


def read_in_place(model: Any, folder: Any) -> None:
    import accelerate

    accelerate.load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


READERS = pytest.mark.parametrize(
    "load",
    [
        read_by_torch,
        read_by_safetensors,
        pytest.param(read_by_accelerate, marks=pytest.mark.extra("accelerate")),
        pytest.param(read_in_place, marks=pytest.mark.extra("accelerate")),
    ],
)


@READERS
def test_a_float_model_does_not_read_codes_as_numbers(load, tmp_path):
    """Not even where names that it does not know are ignored."""
    safetensors.save_model(in_codes(), str(tmp_path / "model.safetensors"))
    model = network()
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|set a tensor of shape"):
        load(model, tmp_path)


@pytest.mark.parametrize("load", [read_by_torch, read_by_safetensors])
def test_a_model_in_codes_reads_them(load, tmp_path):
    model, again = in_codes(), in_codes()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    load(again, tmp_path)
    assert torch.equal(outputs(again), outputs(model))
    assert torch.equal(again[1].weight.codes, model[1].weight.codes)


@pytest.mark.extra("accelerate")
def test_what_accelerate_saves_comes_back(tmp_path):
    import accelerate

    model, again = in_codes(), in_codes()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    accelerate.load_checkpoint_in_model(again, tmp_path)
    assert torch.equal(outputs(again), outputs(model))


def unet() -> Any:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@pytest.mark.extra("diffusers")
@pytest.mark.parametrize("within", [False, True], ids=["model", "pipeline"])
def test_a_model_of_diffusers_is_refused(within, tmp_path):
    import diffusers

    model = quantize_model(unet(), "E4M3")
    saved = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()) if within else model
    with pytest.raises(
        RuntimeError, match="UNet2DModel is in codes, which save_pretrained of diff"
    ):
        saved.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="UNet2DModel, not a transformers model"):
        quantizer.attach(model)
    with pytest.raises(TypeError, match="UNet2DModel, not a transformers model"):
        fm.save(model, tmp_path, "compressed-tensors")
    floats = fm.dequantize_model(model)
    floats.save_pretrained(tmp_path)
    again = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, again.state_dict().values(), floats.state_dict().values()))


@pytest.mark.extra("diffusers")
def test_a_state_of_a_model_of_diffusers_comes_back(tmp_path):
    model, again = (quantize_model(unet(), "E4M3") for _ in range(2))
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    safetensors.load_model(again, tmp_path / "model.safetensors")
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.extra("huggingface_hub")
def test_a_model_of_the_hubs_mixin_is_refused(tmp_path):
    import huggingface_hub

    class Model(nn.Module, huggingface_hub.PyTorchModelHubMixin):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

    model = quantize_model(Model(), "E4M3")
    with pytest.raises(RuntimeError, match=r"'layer\.weight' of this Model is in codes"):
        model.save_pretrained(tmp_path)


def adapters_of(model: Any) -> list[torch.Tensor]:
    adapters = [p for name, p in model.named_parameters() if "lora" in name]
    assert adapters
    return adapters


@pytest.mark.extra("peft")
@pytest.mark.parametrize("pattern", ["q_proj", "lora_A"], ids=["weights", "adapters"])
def test_adapters_are_saved_unless_they_are_in_codes(pattern, tmp_path):
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(llama(tied=False), config)
    quantize_model(model, {"*": "none", pattern: "E4M3"})
    if pattern == "q_proj":
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(llama(tied=False), tmp_path)
        assert all(map(torch.equal, adapters_of(again), adapters_of(model)))
        return
    with pytest.raises(RuntimeError, match="is in codes, which save_pretrained of peft would"):
        model.save_pretrained(tmp_path)
