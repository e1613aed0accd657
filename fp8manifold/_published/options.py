"""What becomes of options of transformers' ``from_pretrained`` in ``load``.

::

    revision, token, ...              where on the Hub the folder is
    attn_implementation, ...          passed on to from_pretrained
    use_safetensors=True, ...         say what holds anyway: dropped
    config, trust_remote_code, ...    refused, with what holds instead
    all others                        changes of the settings in config.json
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

HUB_OPTIONS: Final = ("revision", "token", "cache_dir", "local_files_only", "force_download")
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
_SETTINGS: Final = (
    "settings are those of the folder: give those that differ as options by their names"
)
_FORMATS_ARE_FIXED: Final = "formats are those of the files: use from_pretrained for a float model"
_NAMES_ARE_FIXED: Final = "names are those that transformers knows for the class"
_MODULES_ARE_FIXED: Final = "the modules are those of the files"
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
    "quantization_config": _FORMATS_ARE_FIXED,
    "key_mapping": _NAMES_ARE_FIXED,
    "fusion_config": _MODULES_ARE_FIXED,
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
"""Options that are refused unless they are None or False, with what holds instead."""
_HOLDS_ANYWAY: Final = {
    "use_safetensors": (None, True),
    "low_cpu_mem_usage": (None, True),
    "weights_only": (None, True, False),
}
"""Options that say what holds anyway, with the values that do so."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of ``load``, sorted by what they are for."""

    #: The function that was called, for messages.
    caller: str
    #: Those of a download.
    hub: dict[str, Any]
    #: Those that ``from_pretrained`` gets.
    passed: dict[str, Any]
    #: Changes of the settings in ``config.json``.
    settings: dict[str, Any]
    dtype: Any
    device: torch.device
    subfolder: str
    #: Whether no dtype was asked for, so that tensors keep those of the files.
    keeps_dtypes: bool = False


def sorted_options(
    options: Mapping[str, Any],
    dtype: Any,
    device: torch.device | str | int | None,
    caller: str = "load",
) -> ReadOptions:
    """Sort options by what they are for.

    An option of none of the kinds is a setting, which ``config.json`` may have or not.

    Raises:
        ValueError: an option that would be taken and ignored, with what holds instead;
            one that is given by two names.
    """
    hub: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    rest = dict(options)
    dtype = _one_dtype(dtype, rest.pop("torch_dtype", None))
    device = _one_device(device, rest.pop("device_map", None), caller)
    subfolder = rest.pop("subfolder", None) or ""
    for name, value in rest.items():
        if name in HUB_OPTIONS:
            hub[name] = value
        elif name in _PASSED:
            passed[name] = value
        elif name not in _REFUSED and name not in _HOLDS_ANYWAY:
            settings[name] = value
        elif value not in _HOLDS_ANYWAY.get(name, (None, False)):
            reason = _REFUSED.get(name, _FILES)
            raise ValueError(f"{caller} takes no {name}={value!r:.60}: {reason}")
    return ReadOptions(caller, hub, passed, settings, dtype, device, subfolder)


def _one_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """Return the dtype, given by itself, by name, or as transformers' older option."""
    if dtype is not None and torch_dtype is not None:
        raise ValueError(f"dtype={dtype} and torch_dtype={torch_dtype} are given: give dtype alone")
    return _dtype_of_name(torch_dtype if dtype is None else dtype)


def _dtype_of_name(dtype: Any) -> Any:
    return getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype


def _one_device(
    device: torch.device | str | int | None, device_map: Any, caller: str
) -> torch.device:
    """Return the device, which may be given as transformers' map of the whole model.

    By default it is the CPU.
    """
    chosen = torch.device("cpu" if device is None else device)
    if device_map is not None:
        is_of_whole_model = isinstance(device_map, Mapping) and len(device_map) == 1
        entry: Any = device_map.get("") if is_of_whole_model else device_map
        try:
            mapped = torch.device(entry)
        except (TypeError, RuntimeError):
            raise ValueError(
                f"{caller} takes no device_map={device_map!r:.60}: {_ONE_DEVICE}"
            ) from None
        if device is not None and chosen != mapped:
            raise ValueError(
                f"device={chosen} and device_map={device_map!r:.60} differ: give device alone"
            )
        chosen = mapped
    if chosen.type == "meta":
        raise ValueError("device='meta' can't hold the values that are read: give another device")
    return chosen
