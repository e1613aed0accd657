"""The options of transformers' ``from_pretrained``, by what becomes of them where a
published folder is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

_OF_HUB: Final = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_PASSED: Final = (
    "attn_implementation",
    "experts_implementation",
    "generation_config",
    "use_kernels",
    "kernel_config",
    "allow_all_kernels",
)
_FILES: Final = "the files are those of the folder: give one that has them as model.safetensors"
_ONE_DEVICE: Final = "a model is read to one device: give device="
_FITTING: Final = "a tensor that is missing, unknown or of another shape is refused"
_CLASSES: Final = "the class is the one of transformers that config.json names"
_SETTINGS: Final = "settings are those of the folder: give those that differ by their names"
_FORMATS: Final = "formats are those of the files: use from_pretrained for a float model"
_NAMES: Final = "names are those that transformers knows for the class"
_MODULES: Final = "the modules are those of the files"
#: options that are refused, with what holds instead
_REFUSED: Final = {
    "config": _SETTINGS,
    "name_or_path": _SETTINGS,
    "state_dict": _FILES,
    "variant": _FILES,
    "gguf_file": _FILES,
    "from_tf": _FILES,
    "from_flax": _FILES,
    "mirror": "give a folder, or a name on the Hub",
    "proxies": "set the environment variable HTTPS_PROXY",
    "disable_mmap": "files are mapped, and given back once they were read",
    "output_loading_info": _FITTING,
    "ignore_mismatched_sizes": _FITTING,
    "quantization_config": _FORMATS,
    "key_mapping": _NAMES,
    "fusion_config": _MODULES,
    "trust_remote_code": _CLASSES,
    "code_revision": _CLASSES,
    "max_memory": _ONE_DEVICE,
    "offload_folder": _ONE_DEVICE,
    "offload_buffers": _ONE_DEVICE,
    "offload_state_dict": _ONE_DEVICE,
    "tp_plan": _ONE_DEVICE,
    "tp_size": _ONE_DEVICE,
    "device_mesh": _ONE_DEVICE,
    "distributed_config": _ONE_DEVICE,
    "adapter_kwargs": "put the adapter on the model that was read, with PEFT",
    "adapter_name": "put the adapter on the model that was read, with PEFT",
}
#: options that say what holds anyway, by the values that do so
_HOLDS_ANYWAY: Final = {
    "use_safetensors": (None, True),
    "low_cpu_mem_usage": (None, True),
    "weights_only": (None, True, False),
}


@dataclass(frozen=True)
class ReadOptions:
    """Options of reading: for the Hub, for ``from_pretrained``, and of the settings."""

    hub: dict[str, Any]
    passed: dict[str, Any]
    settings: dict[str, Any]
    dtype: Any
    device: torch.device
    subfolder: str


def sorted_options(
    options: Mapping[str, Any], dtype: Any, device: torch.device | str | int
) -> ReadOptions:
    """Sort what was given beside the folder; refuse what would be taken and ignored.

    What is of none of the kinds is a setting, which ``config.json`` may have or not.

    Raises:
        ValueError: an option that has no meaning here, with what holds instead.
    """
    hub: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    given = dict(options)
    dtype = _dtype(dtype, given.pop("torch_dtype", None))
    device = _device(device, given.pop("device_map", None))
    subfolder = given.pop("subfolder", None) or ""
    for name, value in given.items():
        if name in _OF_HUB:
            hub[name] = value
        elif name in _PASSED:
            passed[name] = value
        elif name not in _REFUSED and name not in _HOLDS_ANYWAY:
            settings[name] = value
        elif value not in _HOLDS_ANYWAY.get(name, (None, False)):
            why = _REFUSED.get(name, _FILES)
            raise ValueError(f"load_fp8 takes no {name}={value!r:.60}: {why}")
    return ReadOptions(hub, passed, settings, dtype, device, subfolder)


def _dtype(dtype: Any, older: Any) -> Any:
    """The dtype, also by its name, or under the name that transformers had for it."""
    names = [getattr(torch, x, x) if isinstance(x, str) else x for x in (dtype, older)]
    dtype, older = names
    if older is None:
        return dtype
    if dtype not in (older, torch.bfloat16):
        raise ValueError(f"dtype={dtype} and torch_dtype={older} differ: give dtype alone")
    return older


def _device(device: torch.device | str | int, map_: Any) -> torch.device:
    """The one device, also as a map of the whole model."""
    own = torch.device(device)
    if map_ is not None:
        whole: Any = map_.get("") if isinstance(map_, Mapping) and len(map_) == 1 else map_
        try:
            mapped = torch.device(whole)
        except (TypeError, RuntimeError):
            raise ValueError(f"load_fp8 takes no device_map={map_!r:.60}: {_ONE_DEVICE}") from None
        if own not in (mapped, torch.device("cpu")):
            raise ValueError(f"device={own} and device_map={map_!r:.60} differ: give device alone")
        own = mapped
    if own.type == "meta":
        raise ValueError("device='meta' has no values, which are read: give another device")
    return own
