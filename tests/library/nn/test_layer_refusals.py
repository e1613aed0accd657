"""Refusals of one-byte tensors, layers, surgery and their files: a line each, and
nothing is changed.
"""

import json
import re

import pytest
import torch
from refused import calls, check_refused
from surgery_models import Model
from tensor_cases import Net, parameter
from test_in_place import Language, seeded
from test_loading import bare, valued_model
from test_plain_state import quantized_net as plain
from torch import Tensor, nn

import fp8manifold as fm


def flat() -> dict[str, Tensor]:
    """The tensors of a file of an earlier version, whose header says what they are."""
    p = parameter()
    return {"w": p.codes, "w_scale": p.scale, "w_counter": p.counter}


def described(**changes) -> dict[str, str]:
    """Such a header, with changes; what is "gone" is left out."""
    description = {
        "format": "E4M3",
        "block_size": None,
        "rounding": "stochastic",
        "seed": 7,
        "by_operator": True,
    }
    description |= {"draws": "independent", "dtype": "float32"} | changes
    parts = {key: value for key, value in description.items() if value != "gone"}
    return {"fp8:w": json.dumps(parts)}


def state(model, **changes) -> dict[str, Tensor]:
    """A state with changes of the parts of its first weight; what is None is left out."""
    changed = model.state_dict() | {f"0.weight{part}": x for part, x in changes.items()}
    return {name: x for name, x in changed.items() if x is not None}


def unfinite() -> nn.Module:
    model = Model()
    with torch.no_grad():
        model.lm_head.weight[3, 2] = torch.nan
        model.blocks[11].attn.proj.weight[0, 0] = torch.inf
    return model


def layer_in_two_places() -> nn.Module:
    """To replace it in one would untie it silently."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def two_buffers() -> nn.Module:
    model = bare()
    model.register_buffer("angles", torch.zeros(2, device="meta"), persistent=False)
    return model


SUBJECTS = {
    "w": lambda: torch.ones(2, 64),
    "codes": lambda: torch.zeros(2, 64, dtype=torch.uint8),
    "left": lambda: torch.zeros(4, 64, dtype=torch.uint8),
    "p": parameter,
    "q": lambda: parameter("E5M2"),
    "blocks": lambda: parameter(granularity="block"),
    "rows": lambda: fm.FP8Tensor(torch.ones(4, 64)),
    "whole": lambda: parameter(granularity="tensor"),
    "squares": lambda: fm.FP8Parameter(torch.ones(200, 64), granularity="square"),
    "flat": flat,
    "plain": plain,
    "linear": lambda: nn.Linear(8, 4),
    "two": lambda: nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8)),
    "model": Model,
    "half": lambda: fm.quantize_model(Model(), {"mlp": "E4M3"}, "grid"),
    "tied": lambda: Model(tied=True),
    "twice": layer_in_two_places,
    "unfinite": unfinite,
    "language": lambda: seeded(Language),
    "experts": lambda: fm.quantize_model(
        seeded(Language), "E4M3", "codes", parameters="*.up", tied="leave"
    ),
    "bare": bare,
    "buffered": two_buffers,
    "valued": valued_model,
    "net": lambda: Net("E5M2"),
    "inputs": lambda: fm.quantize_model(nn.Linear(8, 4), fm.LayerSpec(activation="E4M3")),
    "exported": lambda: fm.quantize_model(
        nn.Sequential(nn.Linear(8, 8)), "E4M3", "codes", granularity="square"
    ),
}
HELPERS = {"described": described, "state": state, "parameter": parameter, "Net": Net}
HELPERS["of"] = lambda fmt, storage: fm.quantize_model(Model(), fmt, storage)
SIZES = {
    name: (m.in_features, m.out_features)
    for name, m in Model().named_modules()
    if isinstance(m, nn.Linear)
}

REFUSED = {
    # one-byte tensors
    "FP8Parameter(w, 'E4MM3')": "ValueError: E4MM3",
    "FP8Parameter(w, 8)": "TypeError: FloatFormat or its name, not int",
    "FP8Parameter([1.0])": "TypeError: w must be a tensor, not list",
    "FP8Parameter(w.int())": "TypeError: w has dtype torch.int32",
    "FP8Parameter(w, granularity='blok')": "ValueError: granularity='blok' & did you mean 'block'",
    "FP8Parameter(w[:, :40], granularity='block')": "ValueError: 32 divides, not shape (2, 40)",
    "FP8Parameter(w, rounding='up')": "ValueError: rounding='up'",
    "FP8Parameter(w, seed=-1)": "ValueError: seed=-1",
    "FP8Parameter(w, headroom=0.5)": "ValueError: headroom=0.5",
    "FP8Parameter(w, headroom=inf)": "ValueError: headroom=inf",
    "FP8Parameter(w, dtype=float64)": "TypeError: dtype=torch.float64 & float32 or torch.bfloat16",
    "FP8Parameter(w, scale=2.0**-130)": "ValueError: scale holds 7.34684e-40 & 2^-126 at least",
    "FP8Parameter(w, scale=-1.0)": "ValueError: scale holds -1",
    "FP8Parameter(w, scale='1')": "TypeError: scale must be a number or a tensor, not str",
    "FP8Parameter(w, scale=ones(64))": "ValueError: (64,): & 'channel' & needs (2, 1)",
    "FP8Parameter(w, granularity='block', scale=ones(2, 1))": "ValueError: needs (2, 2)",
    "FP8Tensor.from_codes(codes.int(), w[:, :1], 'E4M3')": "TypeError: uint8 tensor, not "
    "torch.int32",
    "FP8Tensor.from_codes(codes + 64, w[:, :1], 'E2M3')": "ValueError: code 64 is out of range for "
    "E2M3",
    "FP8Tensor.from_codes(codes, w, 'E4M3')": "ValueError: needs (2, 1)",
    "FP8Tensor.from_codes(codes, w[:, :2], 'E4M3', block_size=16)": "ValueError: block_size=16",
    "FP8Tensor.from_codes(codes, 1.0, 'E4M3', counter=ones(2))": "ValueError: counter & (2,)",
    "FP8Parameter(tensor([[1.0, -inf]]), 'E4M3')": "ValueError: (1, 2) hold NaN or Inf & E4M3",
    # copies, views and casts
    "p.copy_(q)": "ValueError: in E5M2, but this one is in E4M3",
    "p.copy_(parameter(shape=(4, 32)))": "ValueError: shape",
    "whole.copy_(p)": "ValueError: a scale for each channel, but this one for each tensor",
    "p.copy_(blocks)": "ValueError: a scale for each block, but this one for each channel",
    "squares.copy_(FP8Tensor(ones(200, 64), granularity='block'))": "ValueError: this one for each "
    "square",
    "p.t().view(-1)": "RuntimeError: view size is not compatible",
    "p.t_()": "RuntimeError: in place",
    "p.resize_(2, 2)": "RuntimeError: resize",
    "f'{p:.2f}'": "TypeError: unsupported format string",
    # scales
    "blocks.set_scale_(0.0)": "ValueError: scale holds 0: every entry must be finite, and 2^-126 "
    "at least",
    "blocks.set_scale_(2.0**-127)": "ValueError: scale holds 5.87747e-39: & 2^-126 at least",
    "blocks.set_scale_(ones(3, 1))": "ValueError: shape (3, 1): it must fit (4, 2)",
    "blocks.set_scale_(full((4, 2), 128).byte())": "TypeError: scale has dtype torch.uint8",
    "setattr(blocks, 'scale', full((4, 2), -3.0))": "ValueError: scale holds -3",
    "blocks.rescale_(2.0**-127)": "ValueError: scale holds 5.87747e-39",
    "FP8Parameter.from_codes(left, left[:, :2], 'E4M3', block_size=32)": "ValueError: scale holds "
    "the exponent 0",
    "FP8Parameter.from_codes(left, left[:, :1] + 127, 'E4M3')": "TypeError: scale has dtype "
    "torch.uint8",
    # of squares
    "FP8Tensor(w, granularity='squares')": "ValueError: did you mean 'square'",
    "FP8Tensor(w[0], granularity='square')": "ValueError: needs two or more dimensions",
    "FP8Tensor.from_codes(codes, 1.0, 'E4M3', block_size=(64, 64))": "ValueError: block_size=(64, "
    "64) must be 32",
    "FP8Tensor(ones(200, 4), granularity='square', scale=ones(1, 1))": "ValueError: needs (2, 1)",
    "squares.new_zeros((100, 64))": "RuntimeError: a scale for each square of 128 x 128 can't be "
    "sharded",
    "LayerSpec('E4M3', {'format': 'E4M3', 'granularity': 'square'})": "ValueError: square', which "
    "is for weights",
    "quantize_model(linear, 'E4M3', 'grid', granularity='square')": "ValueError: "
    "granularity='square' needs",
    "quantize_model(nn.Sequential(nn.Conv2d(2, 2, 3), linear), 'E4M3', 'codes', "
    "granularity='square', parameters='0')": (
        "ValueError: parameter '0.weight' is a convolution's"
    ),
}
SPECS = {
    "weight={'formt': 'E4M3'}": "ValueError: weight has an unknown key 'formt' & did you mean "
    "'format'",
    "weight={'rounding': 'nearest'}": "ValueError: weight has options but no format",
    "weight={'format': 'E4M3', 'rounding': 'split'}": "ValueError: rounding='split' & nearest, "
    "stochastic",
    "weight={'format': 'E4M3', 'scale': 'global'}": "ValueError: weight has scale='global'",
    "weight={'format': 'E4M3', 'scale': 0}": "ValueError: scale=0 is out of range",
    "weight={'format': 'E4M3', 'scale': 1.0, 'policy': 'static'}": "ValueError: scale=1.0 & "
    "policy='static'",
    "weight={'format': 'E4M3', 'scale': 1.0, 'granularity': 'block'}": "ValueError: "
    "granularity='block'",
    "weight={'format': 'E4M3', 'history': 20}": "ValueError: history=20 needs policy='delayed'",
    "weight={'format': 'E4M3', 'policy': 'delayed', 'history': 0}": "ValueError: history=0",
    "weight='E4M3', history=20": "ValueError: history=20 needs an operand with policy='delayed', and "
    "there is none",
    "weight='E4M3', rounding='splitt'": "ValueError: rounding='splitt' & did you mean 'split'",
    "activation={'format': 'E4M3', 'granularity': 'channel', 'policy': 'static'}": "ValueError: "
    "batch",
    "activation={'format': 'E4M3', 'granularity': 'block'}, policy='delayed'": "ValueError: batch",
    "gradient={'format': 'E5M2', 'ste': 'relu'}": "ValueError: activation_gradient has ste='relu'",
    "gradient={'weights': 'E5M2'}": "ValueError: gradient has an unknown key 'weights' & 'weight'",
    "gradient={'weight': 'E5M2', 'rounding': 'nearest'}": "ValueError: gradient has an unknown key "
    "'rounding'",
    "weight=3": "TypeError: int",
}
#: of a model with 49 linear layers
FORMATS = {
    "{'atn': 'E4M3'}": "ValueError: pattern 'atn' matches none of the 49 linear layers; did you "
    "mean 'attn'",
    "{'*': 'E4M3', 'embedding': 'none'}": "ValueError: 'embedding'",
    "{'attn': 'E9M9'}": "ValueError: E9M9",
    "{'attn': {'weights': 'E4M3'}}": "ValueError: unknown key 'weights' & did you mean 'weight'",
    "{'attn': {'weight': 'E4M3', 'ste': 'clip'}}": "ValueError: ste='clip' & 'clipped'",
    "{'attn': {'weight': 'E4M3', 'ste': 'clipped'}}": "ValueError: ste='clipped' & or give "
    "storage='master'",
    "{'attn': {'weight': 'E4M3', 'policy': 'static'}}": "ValueError: policy='static' & or give "
    "storage='master'",
    "{'attn': {'weight': {'format': 'E4M3', 'scale': 0.5}}}": "ValueError: scale=0.5, which needs "
    "storage='master'",
    "{'attn': {'activation': 'E4M3', 'granularity': 'tensor'}}": "ValueError: granularity='tensor' "
    "& for a weight",
    "{'attn': {'weight': 'E4M3', 'policy': 'late'}}": "ValueError: policy='late'",
    "{'attn': 4}": "TypeError: formats['attn'] & int",
    "{4: 'E4M3'}": "TypeError: key 4",
    "['E4M3']": "TypeError: list",
    "{}": "ValueError: empty",
}
OPTIONS = {
    "storage='gird'": "ValueError: did you mean 'grid'",
    "storage='fp8'": "ValueError: is now called storage='codes'",
    "granularity='row', storage='grid'": "ValueError: granularity='row'",
    "rounding='up', storage='grid'": "ValueError: rounding='up'",
    "headroom='16', storage='grid'": "TypeError: headroom='16'",
    "seed=1.0, storage='grid'": "TypeError: seed=1.0",
    "storage='grid', granularity='block'": "ValueError: granularity='block' needs storage='codes' or "
    "'master'",
    "storage='grid', keep_remainder=True": "ValueError: keep_remainder=True needs storage='codes'",
}
IN_EVERY_STORAGE = {
    "unfinite, {'*': 'E4M3', 'lm_head': 'none'}": "NaN or Inf",
    "tied, 'E4M3'": "'lm_head' is shared (embedding.weight, & give embeddings= the layer's format "
    "& tied='untie' & tied='leave'",
    "twice, 'E4M3'": "layer '0' is shared",
}
DRAWS = {
    "storage='codes', draws='dithr'": "draws='dithr' is unknown & did you mean 'dither'?",
    "storage='master', draws='dither'": "draws='dither' needs storage='codes' or 'grid'",
    "storage='master', headroom=2.0": "headroom=2.0 needs storage='codes' or 'grid', not 'master'",
}
PARAMETERS = {
    "parameters='expert'": "ValueError: pattern 'expert' matches none of the 2 parameters "
    "& 'experts'",
    "parameters={'inner': 'E4M3'}": "ValueError: pattern 'inner' matches none",
    "parameters=[]": "ValueError: parameters is empty",
    "parameters={3: 'E4M3'}": "TypeError: parameters has 3: a pattern must be a string",
    "parameters={'*': 'E9M9'}": "ValueError: E9M9",
    "embeddings={'inner': 'E4M3'}": "ValueError: embeddings: pattern 'inner' matches none",
    "embeddings='E5M2'": "ValueError: the weight of 'head' is shared",
}
#: changes of a state
STATES = {
    "_scale=None": "0.weight holds codes & and 0.weight_scale is missing",
    "_scale=None, _scale_inv=ones(4, 1)": "0.weight holds codes & with the scales "
    "'0.weight_scale_inv'",
    "_traits=zeros(9).long()": "0.weight_traits can't be read: Expected 10 arguments, got 9",
    "_scale=full((4, 1), -0.3)": "0.weight can't be put together from its parts: scale holds -0.3",
    "_scale=ones(3, 1)": "scale has shape (3, 1)",
    "_traits=zeros(11).long()": "0.weight_traits can't be read: & exponent_bits=0",
    "_traits=tensor([4, 3, 7, 9, 0, 0, 0, 0, 1, 0, 1])": "9 is out of range: 0 to 5",
    "_traits=tensor([4, 3, 7, 1, 0, -1, 0, 0, 1, 0, 1])": "seed=-1",
    "_counter=zeros(2).long()": "counter has shape",
    "_remainder=zeros(4, 64)": "0.weight can't be put together & remainder is torch.float32",
    "_traits=None": "0.weight has a 0.weight_counter but no 0.weight_traits, as in files "
    "of earlier versions",
    "_traits=None, _counter=None, **{'': zeros(4, 64).byte()}": "which say in which format",
    "_traits=None, _counter=None, **{'': zeros(4, 64).to(float8_e5m2)}": "is in E5M2, but "
    "this layer's",
}
#: changes of a header of an earlier version
HEADERS = {
    "format='E9M9'": "'w' can't be put together & E9M9",
    "format=8": "must be a str, not int",
    "block_size=32": "needs (4, 2)",
    "rounding='up'": "rounding='up'",
    "seed=-1": "seed=-1",
    "dtype='float16'": "'w' can't be put together",
    "dtype='gone'": "KeyError('dtype')",
    "by_operator='gone'": "KeyError('by_operator')",
    "draws='gone'": "KeyError('draws')",
}
#: changes of the tensors of an earlier version
TENSORS = {
    "{'w': zeros(4, 64)}": "w holds torch.float32, but w_traits says codes",
    "{'w_scale': full((4, 1), -0.3)}": "scale holds -0.3",
    "{'w_scale': ones(3, 1)}": "(3, 1) & needs (4, 1)",
}
for storage in ("master", "grid", "codes"):
    REFUSED |= calls(f"quantize_model(..., '{storage}')", IN_EVERY_STORAGE, "ValueError: ")
REFUSED |= {
    **calls("LayerSpec(...)", SPECS),
    **calls("quantize_model(model, 'E4M3', ...)", OPTIONS),
    "quantize_model(tied, 'E4M3', tied='keep')": "ValueError: tied='keep' & refuse, untie, leave",
    "quantize_model(twice, 'E4M3', tied='untie')": "ValueError: layer '0' is shared",
    "quantize_model(half, 'E5M2', 'grid')": "ValueError: 'blocks.0.mlp.fc' is quantised already",
    "quantize_model(two, 'E4M3', 'codes', granularity='block')": "ValueError: of weight needs rows "
    "whose length 32",
    "quantize_model(nn.Linear(8, 4, dtype=float16), 'E4M3', 'codes')": "TypeError: storage='codes' "
    "takes float32 or",
    "quantize_model({}, 'E4M3')": "TypeError: dict",
    "quantize_model(nn.Linear(8, 4).double(), 'E4M3')": "TypeError: torch.float64 & and "
    "storage='master' others too",
    "quantize_model(nn.Sequential(nn.ReLU()), 'E4M3')": "ValueError: the model has no linear layer",
    "QuantizedLinear(nn.Conv1d(1, 1, 1), LayerSpec('E4M3'))": "TypeError: Conv1d",
    "inputs.weight_codes()": "ValueError: this layer has weight=None",
    "quantization_report({})": "TypeError: not dict",
    "averaged_model(linear, use_buffers=True)": "ValueError: use_buffers=True",
    "averaged_model(linear, decay=0.9)": "TypeError: averaged_model has no option 'decay'",
    **calls("quantize_model(linear, 'E4M3', ...)", DRAWS, "ValueError: "),
    **calls("quantize_model(linear, {'*': 'none'}, ...)", DRAWS, "ValueError: "),
    **calls("QuantizedLinear(linear, LayerSpec('E4M3'), ...)", DRAWS, "ValueError: "),
    # parameters and embeddings
    **calls("quantize_model(language, 'E4M3', 'codes', ...)", PARAMETERS),
    "quantize_model(language, 'E4M3', 'grid', parameters='*')": "ValueError: not with "
    "storage='grid'",
    "quantize_model(language, {'inner': 'E4M3'}, 'codes', parameters='*.up')": "ValueError: give "
    "parameters=",
    "quantize_model(linear, 'E4M3', 'codes', embeddings='E4M3')": "ValueError: has no nn.Embedding",
    "quantize_model(experts, {'*': 'none'}, 'codes', parameters={'*.up': 'E5M2'})": "ValueError: "
    "'experts.up'",
    # states that are loaded
    **calls("plain.load_state_dict(state(plain, ...))", STATES, "RuntimeError: "),
    "of('E5M2', 'codes').load_state_dict(of('E4M3', 'codes').state_dict())": "RuntimeError: "
    "lm_head.weight is in E4M3",
    "of('E5M2', 'grid').load_state_dict(of('E4M3', 'grid').state_dict())": "RuntimeError: manifold "
    "is in E5M2",
    "net.load_state_dict(Net('E4M3').state_dict())": "RuntimeError: first.weight & is in E4M3, but "
    "this one is in E5M2",
    "FP8Manifold('E4M3').load_state_dict(FP8Manifold('E4M3', ones(2, 1)).state_dict())": "RuntimeError: "
    "size "
    "mismatch",
    # files of earlier versions
    **calls("unflatten(flat, described(...))", HEADERS, "ValueError: "),
    "unflatten(flat, {'fp8:w': '{'})": "ValueError: 'w' can't be put together from '{'",
    "unflatten(flat, {'fp8:v': described()['fp8:w']})": "ValueError: lack 'v'",
    **calls("unflatten(flat | ..., described())", TENSORS, "ValueError: "),
    # models read and written
    "load_into(valued, {}, tied='leave')": "ValueError: parameter 'tokens.weight' has values "
    "already",
    "load_into(bare, {})": "ValueError: the weight of 'head' is shared",
    "load_into(bare, {}, storage='grid')": "TypeError: has no option storage",
    "load_into(buffered, valued.state_dict(), tied='leave')": "ValueError: buffer 'angles' "
    "has no values",
    "layout_state_dict(two)": "ValueError: no quantised weight: call quantize_model",
    "layout_state_dict({})": "TypeError: must be an nn.Module, not dict",
    "layout_state_dict(two, 'compressed_tensors')": "ValueError: did you mean 'compressed-tensors'",
    "layout_state_dict(exported, activations='fp8')": "ValueError: activations='fp8' is unknown: "
    "one of float, E4M3",
    "layout_state_dict(exported, 'torchao', activations='E4M3')": "ValueError: "
    "layout='compressed-tensors', "
    "not",
    "layout_state_dict(exported, 'torchao')": "ValueError: takes a scale for a tensor, a row or a "
    "block of 32",
    "layout_state_dict(half, 'fp8')": "ValueError: quantise with granularity='square'",
    "layout_state_dict(quantize_model(linear, 'E5M2', granularity='square'), 'fp8')": "ValueError: "
    "takes one "
    "of E4M3",
    "save(exported, 'nowhere')": "TypeError: Sequential & save its state_dict",
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused_in_one_line_and_nothing_is_changed(call) -> None:
    check_refused(call, REFUSED[call], SUBJECTS, **HELPERS)


@pytest.mark.parametrize("storage", ["", ", 'grid'"], ids=["default", "grid"])
@pytest.mark.parametrize("formats", FORMATS)
def test_what_is_not_allowed_is_known_without_a_model(formats, storage) -> None:
    words = FORMATS[formats]
    by_model = check_refused(f"quantize_model(model, {formats}{storage})", words, SUBJECTS)
    by_sizes = check_refused(
        f"check_formats({formats}, SIZES{storage})", words, SUBJECTS, SIZES=SIZES
    )
    assert by_sizes == by_model


@pytest.mark.parametrize(
    ("storage", "codes", "message"),
    [
        ("codes", ("E5M2", "channel", (4, 4)), "'E5M2', 'channel'), but the layer's weight has"),
        ("codes", ("E4M3", "tensor", (4, 4)), "'E4M3', 'tensor'), but the layer's weight has"),
        ("codes", ("E4M3", "channel", (2, 4)), "(2, 4), 'E4M3', 'channel'), but the layer's"),
        ("grid", ("E4M3", "channel", (4, 4)), "codes need storage='codes' and a weight format"),
        ("master", ("E4M3", "channel", (4, 4)), "codes need storage='codes' and a weight format"),
    ],
    ids=["format", "granularity", "shape", "grid", "master"],
)
def test_codes_of_another_kind_than_the_layers_are_not_assigned(storage, codes, message):
    fmt, granularity, shape = codes
    layer = fm.quantize_model(nn.Linear(4, 4), "E4M3", storage)
    weight = layer.weight
    unlike_weight = fm.FP8Parameter(torch.ones(shape), fmt, granularity=granularity)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.weight = unlike_weight
    assert layer.weight is weight


def test_codes_of_the_layers_kind_are_assigned():
    layer = fm.quantize_model(nn.Linear(4, 4), "E4M3")
    layer.weight = fm.FP8Parameter(torch.ones(4, 4), "E4M3")
    assert torch.equal(layer.weight.dequantize(), torch.ones(4, 4))
    tensors, _ = fm.files.layout_state_dict(layer)
    assert torch.equal(tensors["weight"].float() * tensors["weight_scale"], torch.ones(4, 4))
