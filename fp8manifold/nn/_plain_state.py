"""States of plain tensors, which every library that saves models can write."""

from torch import nn

from fp8manifold.nn._linear import QuantizedLinear

__all__ = ["use_plain_state"]


def use_plain_state(model: nn.Module) -> nn.Module:
    """Let ``state_dict()`` give one-byte weights as plain tensors, for libraries that write these and nothing else.

    A layer's ``weight`` is then its codes (float8_e4m3fn or float8_e5m2, uint8 in other formats), ``weight_scale`` the
    scales (float32 powers of two, of blocks uint8 exponents, 127 + log2, as in E8M0), ``weight_counter`` a count
    (int64), and ``weight_traits`` ten int64: exponent bits, mantissa bits, bias, number of the layout, of the rounding,
    seed, number of the dtype, block size or 0, whether an operator's name enters its draws, and how these follow each
    other.  ``weight_remainder`` (int8) is what rounding left, where it is kept: until an optimizer has taken it.
    ``load_state_dict`` puts them together again, in every quantised layer and whether or not this was called; so it
    does codes and scales alone, as compressed-tensors keeps them.

    Safetensors, accelerate's ``save_state``, ``save_model`` and ``load_state``, and transformers' ``Trainer`` then keep
    a model to the bit, what is to be drawn next included.  ``fully_shard`` and distributed checkpoints do not need it,
    and take the weights as they are.

    Args:
        model: of :func:`quantize_model`; changed in place.  Layers that are quantised later have the other state.

    Returns:
        The model.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Example:
        >>> from fp8manifold import quantize_model
        >>> model = use_plain_state(quantize_model(nn.Sequential(nn.Linear(2, 2, bias=False)), "E4M3", storage="fp8"))
        >>> {name: str(x.dtype) for name, x in model.state_dict().items() if not name.endswith("s")}
        {'0.weight': 'torch.float8_e4m3fn', '0.weight_scale': 'torch.float32', '0.weight_counter': 'torch.int64'}
        >>> model.load_state_dict(model.state_dict())
        <All keys matched successfully>

    Source: the names of compressed-tensors (vllm-project).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.has_plain_state = True
    return model
