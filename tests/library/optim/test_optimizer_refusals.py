"""Refusals of the optimizers, a line each."""

import builtins
import math
from functools import partial

import geoopt
import optimizer_cases as cases
import pytest
import torch
from optimizer_cases import frozen, grid_weight, normal, put_gradients, snapshot, stored_weight
from refused import NAMES, check_refused, named
from test_fisher import optimizer_of, tagger
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import RiemannianSGD, StiffnessAdamW, StiffnessSGD
from fp8manifold.optim import _checks as checks

KINDS = {kind.__name__: kind for kind in cases.CLASSES}
#: Options that all of them refuse, that those with `betas` do, and those with `momentum`.
#: Errors are written as `check_refused` reads them.
COMMON = {
    **named(
        "ValueError",
        "lr=-0.1; lr=nan; lr=inf; lr=1e+39; weight_decay=1e+39; weight_decay=-1.0; weight_decay=inf; damping=-0.5; damping=1.5",
    ),
    **named(
        "ValueError",
        "clip=0.5; clip=nan; refresh_every=0; seed=-1; stabilize_every=0; reset_every=-3; "
        "moments=8",
    ),
    **named(
        "ValueError",
        "foreach=True; fused=True; capturable=True; differentiable=True",
        " is not supported by",
    ),
    **named("TypeError", "lr='0.1'; lr=True; refresh_every=1.5; seed=0.5; maximize=1"),
    "lr=[]": "TypeError: lr=",
    "lr=tensor([0.1, 0.2])": "ValueError: lr has shape (2,)",
    "writeback='stochastik'": "ValueError: writeback='stochastik' & did you mean 'stochastic'",
    "on_nonfinite='skipp'": "ValueError: on_nonfinite='skipp' & did you mean 'skip'",
    "moments='8bits'": "ValueError: moments='8bits' & did you mean '8bit'",
}
BETAS = {
    "betas=(1.0, 0.9)": "ValueError: betas[0]=1.0",
    "betas=(0.9, -0.1)": "ValueError: betas[1]=-0.1",
    "betas=(0.9,)": "TypeError: betas=(0.9,)",
    "betas=0.9": "TypeError: betas=0.9",
    "eps=-1e-8": "ValueError: eps=-1e-08",
    "eps=inf": "ValueError: eps=inf",
}
MOMENTUM = {
    "momentum=inf": "ValueError: momentum=inf",
    "dampening=nan, momentum=0.9": "ValueError: dampening=nan",
    "momentum=0.0, moments='8bit'": "ValueError: moments='8bit' needs momentum > 0",
    "momentum=0.0, writeback='momentum'": "ValueError: writeback='momentum' needs 0 < momentum < 1",
    "momentum=1.0, writeback='momentum'": "ValueError: writeback='momentum' needs 0 < momentum < 1",
    "momentum=0.9, nesterov=True, writeback='momentum'": "ValueError: nesterov=True",
}
WITHOUT_LR = {"lr=None": "TypeError: lr="}
OPTIONS = {
    "StiffnessAdamW": {
        **named("ValueError", "stiffness=9.0; writeback=None"),
        **named("TypeError", "stiffness='1'"),
        "betas=(0.0, 0.9), writeback='momentum'": "ValueError: needs betas[0] > 0",
        "stiffness=lambda step: nan": "ValueError: stiffness=nan",
        "metric='ulps'": "ValueError: metric='ulps' & did you mean 'ulp'",
        "metric=1": "TypeError: metric",
    },
    "StiffnessSGD": named("ValueError", "stiffness=-9"),
    "StiffnessLion": named("ValueError", "stiffness=nan")
    | {"betas=(0.9, 1.0)": "ValueError: betas[1]=1.0"},
    "RiemannianAdam": {
        "betas=(0.0, 0.9), writeback='momentum'": "ValueError: needs betas[0] > 0",
        "amsgrad=True, moments='8bit'": "ValueError: amsgrad=True does not go with moments='8bit'",
        "float_lr=-1.0": "ValueError: float_lr=-1.0",
        "stabilize=0": "ValueError: stabilize",
        "stabilize=5, stabilize_every=10": "ValueError: stabilize=5 and stabilize_every=10",
    },
    "RiemannianSGD": {
        **named("ValueError", "float_lr=inf; momentum=-0.9"),
        **named("TypeError", "dampening='x'"),
        "stabilize=0": "ValueError: stabilize",
        "nesterov=True": "ValueError: nesterov=True needs momentum",
        "nesterov=True, momentum=0.9, dampening=0.1": "ValueError: dampening=0.1",
    },
}
ALL_OF = {
    kind: {
        **COMMON,
        **(BETAS if kind in ("StiffnessAdamW", "RiemannianAdam") else {}),
        **(MOMENTUM if kind in ("StiffnessSGD", "RiemannianSGD") else {}),
        **({} if kind.startswith("Riemannian") else WITHOUT_LR),
        **OPTIONS[kind],
    }
    for kind in KINDS
}
#: Calls of every optimizer. `calls` writes its name in place of K, and in place of `own` that
#: of the subject, an optimizer that has taken a step.
CALLS = {
    # parameters
    "K([])": "ValueError: empty parameter list",
    "K([{'params': [weight]}, {'params': [weight]}])": "ValueError: more than one parameter group",
    "K([weight, weight])": "ValueError: twice",
    "K(ones(2))": "TypeError: Tensor",
    "K(3)": "TypeError: int",
    "own.add_param_group({'params': {weight}})": "TypeError: set",
    "own.add_param_group([weight])": "TypeError: list",
    "K([nn.Parameter(ones(3, dtype=complex64))])": "ValueError: complex64",
    "sparse(K).step()": "ValueError: takes dense real gradients only & of shape (3, 2) is sparse",
    "K([weight, nn.Parameter(ones(3, device='meta'))])": "ValueError: meta",
    "K([weight, nn.Parameter(ones(3).to(float8_e4m3fn))])": "ValueError: float8_e4m3fn",
    "K([weight, nn.Parameter(ones(3).long(), requires_grad=False)])": "ValueError: int64",
    "K([weight, on(FP8Manifold('E4M3'), ones(3, device='meta'))])": "ValueError: meta",
    "K([weight, elsewhere])": "ValueError: is on cpu and its manifold on meta",
    # groups and words
    "own.add_param_group({'params': [weight], 'lr': -1.0})": "ValueError: lr",
    "K([weight], foreech=True)": "TypeError: unexpected keyword argument 'foreech'; did you mean "
    "'foreach'",
    "K([weight], learning_rate=0.1)": "TypeError: K got an unexpected keyword argument "
    "'learning_rate'",
    # states
    "own.load_state_dict(StiffnessWrapper(SGD([weight], 0.1)).state_dict())": "ValueError: K",
    "own.load_state_dict(SGD([weight], 0.1).state_dict())": "ValueError: K",
    "own.load_state_dict(optim.AdamW([weight]).state_dict())": "ValueError: K",
    "own.load_state_dict(other(K).state_dict())": "ValueError: not of K",
    "own.load_state_dict(K([weight, on(FP8Manifold('E4M3'), ones(3))]).state_dict())": (
        "ValueError: size"
    ),
    "own.load_state_dict(changed(own, lr=-1.0))": "ValueError: lr=-1.0",
    "own.load_state_dict({})": "ValueError: param_groups",
    "own.load_state_dict(None)": "TypeError: state_dict must be a dict & NoneType",
}
#: Shapes that StiffnessMuon refuses.
MUON = {
    "5,": "ValueError: no matrix & direction='adam'",
    "": "ValueError: no matrix",
    "2, 3, 4": "ValueError: matrix_shape='flatten'",
}
MUON_OPTIONS = {
    **named(
        "ValueError",
        "matrix_shape='rows'; momentum=1.0; ns_steps=100; adjust_lr_fn='rms'; direction='sgd'; "
        "eps=-1.0",
    ),
    **named("ValueError", "foreach=True") | named("TypeError", "nesterov=1"),
    "momentum=0.0, moments='8bit'": "ValueError: momentum > 0",
    "momentum=0.0, writeback='momentum'": "ValueError: momentum > 0",
    "ns_coefficients=(1.0, nan, 0.0)": "ValueError: ns_coefficients",
    "writeback='momentum', moments='8bit'": "ValueError: 8bit",
    "ns_dtype=int8": "TypeError: ns_dtype",
    "ns_coefficients=3.0": "TypeError: ns_coefficients",
}
WRAPPER = {
    **named(
        "ValueError", "scale=-1.0; exponent=9.0; damping=2.0; clip=0.1; refresh_every=0; seed=-1"
    ),
    **named("TypeError", "scale='1'"),
    "exponent=lambda step: 10.0": "ValueError: exponent=10.0",
    "on='updates'": "ValueError: on='updates' & did you mean 'update'",
    "metric='ul'": "ValueError: metric='ul' & 'ulp'",
    "writeback='near'": "ValueError: writeback='near' & 'nearest'",
}
FISHER = {
    **named(
        "ValueError",
        "refresh=0; damping=-0.1; floor=2.0; momentum=1.0; decay=1.0",
        " is out of range",
    ),
    **named("ValueError", "batches=0; samples=0; max_features=0"),
    "representation='kfak'": "ValueError: representation='kfak' is unknown & did you mean 'kfac'",
    "refresh=2.0": "TypeError: refresh=2.0 must be an int",
    "damping='much'": "TypeError: damping='much' must be a number",
    "normalize=1": "TypeError: normalize=1 must be True or False",
    "betas=(0.9, 1.0)": "ValueError: betas[1]=1.0",
    "momentum=0.0, moments='8bit'": "ValueError: needs momentum > 0",
    "momentum=0.0, writeback='momentum'": "ValueError: needs momentum > 0",
    "writeback='momentum', moments='8bit'": "ValueError: does not go with",
    "fused=True": "ValueError: fused=True is not supported",
    "refresch=3": "TypeError: unexpected keyword argument 'refresch'",
    "logits=3": "TypeError: logits must be a function",
}
SPECIAL = {
    **{f"StiffnessMuon([nn.Parameter(ones([{shape}]))])": words for shape, words in MUON.items()},
    "StiffnessMuon([nn.Parameter(ones(2, 3, 4, 5))], matrix_shape='batch')": "ValueError: "
    "matrix_shape",
    "StiffnessMuon.for_model(nn.Linear(2, 3), direction='adam')": "TypeError: leave direction out",
    **{
        f"StiffnessMuon([nn.Parameter(ones(2, 3))], {arguments})": words
        for arguments, words in MUON_OPTIONS.items()
    },
    "muon_report(3)": "TypeError: not int",
    "muon_report(tagger(), others=['nothing'])": "ValueError: names no module",
    **{
        f"StiffnessWrapper(SGD([weight], lr=0.1), {arguments})": words
        for arguments, words in WRAPPER.items()
    },
    "StiffnessWrapper([weight])": "TypeError: not list",
    "StiffnessWrapper(SGD([weight], 0.1)).load_state_dict(SGD([weight], 0.1).state_dict())": (
        "ValueError: StiffnessWrapper"
    ),
    "StiffnessAdamW([weight], metrc='ulp')": "TypeError: StiffnessAdamW got an unexpected keyword "
    "argument 'metrc'",
    "RiemannianSGD([weight], metric='ulp')": "TypeError: RiemannianSGD got an unexpected keyword "
    "argument 'metric'",
    # schedules
    "anneal(1.0, 0.0, 0)": "ValueError: steps=0",
    "anneal(1.0, 0.0, 2.5)": "TypeError: steps=2.5",
    "anneal('1', 0.0, 5)": "TypeError: start='1'",
    **{
        f"anneal(1.0, {end}, 5)": f"ValueError: end={end} is out of range: (-inf, inf)"
        for end in (math.nan, math.inf)
    },
    "anneal(1.0, -inf, 5)": "ValueError: end=-inf is out of range: (-inf, inf)",
    # of a metric that is measured
    **{f"fisher(tagger(), {arguments})": words for arguments, words in FISHER.items()},
    "fisher(tags).load_state_dict(StiffnessAdamW([weight]).state_dict())": "ValueError: "
    "FisherNaturalGradient",
    **{
        f"FisherNaturalGradient({arguments})": words
        for arguments, words in {
            "tags.parameters(), 'model', [1]": "TypeError: model must be an nn.Module",
            "tags.parameters(), tags, iter([1])": "TypeError: used up after one pass",
            "tags.parameters(), tags, 3": "TypeError: loader must be iterable",
            "[tags.norm.weight], tags, [1]": "ValueError: none of the parameters is the weight of "
            "a linear layer",
            "tagger().parameters(), tags, [1]": "ValueError: none of the parameters",
        }.items()
    },
}


def trained(kind, weight, **options):
    optimizer = kind(
        [weight], **{"momentum": 0.9} if kind in (StiffnessSGD, RiemannianSGD) else {}, **options
    )
    put_gradients([weight], 0)
    optimizer.step()
    return optimizer


def sparse(kind):
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = kind([parameter])
    parameter.grad = torch.ones(3, 2).to_sparse()
    return optimizer


def calls():
    """Yield every call with its expected error: options of the constructor and of a group."""
    for kind, options in ALL_OF.items():
        for option, expected in options.items():
            yield f"{kind}([weight], {option})", expected
            yield f"{kind}([{{'params': [weight], **dict({option})}}])", expected
        for call, expected in CALLS.items():
            call_of_kind = call.replace("K", kind).replace("own", f"own_{kind}")
            yield call_of_kind, expected.replace("K", kind)
    for kind in [name for name in KINDS if name not in ("RiemannianAdam", "RiemannianSGD")]:
        yield f"{kind}([sphere])", "ValueError: RiemannianAdam"
        yield f"own_{kind}.add_param_group({{'params': [sphere]}})", "ValueError: RiemannianAdam"
    yield from SPECIAL.items()


REFUSED = dict(calls())
#: the calls that import nngeometry
OF_FISHER = [call for call in REFUSED if "fisher" in call.lower()]
SUBJECTS = {
    **{f"own_{name}": partial(trained, kind, stored_weight()) for name, kind in KINDS.items()},
    "weight": grid_weight,
    "sphere": lambda: geoopt.ManifoldParameter(
        geoopt.Sphere().projx(normal(4)), manifold=geoopt.Sphere()
    ),
    "tags": tagger,
}
HELPERS = {
    "sparse": sparse,
    "on": cases.manifold_parameter,
    "tagger": tagger,
    "fisher": optimizer_of,
    "optim": torch.optim,
    "changed": lambda optimizer, **options: {
        **optimizer.state_dict(),
        "param_groups": [{**optimizer.state_dict()["param_groups"][0], **options}],
    },
    "other": lambda kind: trained(
        RiemannianSGD if kind is not RiemannianSGD else StiffnessAdamW, stored_weight()
    ),
    "elsewhere": geoopt.ManifoldParameter(
        torch.zeros(3, 4), manifold=fm.FP8Manifold("E4M3", 2.0**-5).to("meta")
    ),
}


@pytest.mark.filterwarnings(
    "ignore:optimizer contains a parameter group with duplicate:UserWarning"
)
@pytest.mark.parametrize("call", [call for call in REFUSED if call not in OF_FISHER])
def test_a_call_is_refused_in_one_line_and_nothing_is_changed(call):
    message = check_refused(call, REFUSED[call], SUBJECTS, **HELPERS)
    assert "load_state_dict" not in call or len(message) < 300


@pytest.mark.extra("nngeometry")
@pytest.mark.parametrize("call", OF_FISHER)
def test_a_call_of_the_fisher_optimizer_is_refused_likewise(call):
    check_refused(call, REFUSED[call], SUBJECTS, **HELPERS)


@cases.every_class
def test_what_is_off_may_be_said(kind):
    flags = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)
    optimizer, weight = kind([grid_weight()], **flags), grid_weight()
    optimizer.add_param_group({"params": [weight], **flags})
    assert optimizer.param_groups[1]["params"] == [weight]


#: Options that no constructor takes, and values that the state does not have.
ASTRAY = {option: expected for option, expected in COMMON.items() if "supported" not in expected}
ASTRAY |= {
    "lr=tensor(nan)": "ValueError: lr=",
    "moments='8bit'": "ValueError: moments='8bit'",
    "moments='bfloat16'": "ValueError: moments='bfloat16'",
    "writeback='residual4'": "ValueError: writeback='residual4' & residual8",
}


@cases.every_class
@pytest.mark.parametrize("option", ASTRAY)
def test_options_set_between_steps_are_checked(kind, option):
    weight, plain = stored_weight(), nn.Parameter(normal(5))
    extra = {"momentum": 0.9} if kind in (StiffnessSGD, RiemannianSGD) else {}
    extra |= {"float_lr": 0.01} if kind in cases.RIEMANNIAN else {}
    optimizer = kind([{"params": [plain]}, {"params": [weight]}], writeback="residual8", **extra)
    put_gradients([plain, weight], 0)
    optimizer.step()
    group = optimizer.param_groups[1]
    original = dict(group)
    group.update(eval(f"dict({option})", NAMES))
    put_gradients([plain, weight], 1)
    old_state = snapshot(optimizer)
    error, words = ASTRAY[option].split(": ", 1)
    with pytest.raises(getattr(builtins, error)) as raised:
        optimizer.step()
    assert all(word in str(raised.value) for word in words.split(" & "))
    assert snapshot(optimizer) == old_state
    group.update(original)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


BLOCK, SQUARE, TENSOR = (
    {"shape": (4, 64), "granularity": kind} for kind in ("block", "square", "tensor")
)
#: name: (functions that make the saved parameter and the one it is loaded for, the message)
ANOTHER = {
    "shape": (
        lambda: stored_weight(shape=(4, 64)),
        lambda: stored_weight(shape=(64, 4)),
        r"\(4, 64\).*\(64, 4\)",
    ),
    "format": (lambda: stored_weight("E4M3"), lambda: stored_weight("E5M2"), "E4M3.*E5M2"),
    "layout": (
        lambda: stored_weight("E4M3"),
        lambda: stored_weight("E4M3FNUZ"),
        "E4M3, .*E4M3FNUZ, ",
    ),
    "grid format": (lambda: grid_weight("E4M3"), lambda: grid_weight("E3M4"), "E4M3.*E3M4"),
    "granularity": (
        lambda: stored_weight(**BLOCK),
        lambda: stored_weight(**TENSOR),
        "per block of 32.*per tensor",
    ),
    "square": (
        lambda: stored_weight(**SQUARE),
        lambda: stored_weight(**TENSOR),
        "per square of 128 x 128.*per tensor",
    ),
    "ordinary": (lambda: nn.Parameter(normal(3, 7)), stored_weight, "ordinary parameter"),
    "no ordinary one": (stored_weight, lambda: nn.Parameter(normal(3, 7)), "ordinary parameter"),
}


@cases.every_class
@pytest.mark.parametrize(("saved", "current", "message"), ANOTHER.values(), ids=ANOTHER)
def test_a_state_made_for_another_parameter_is_refused(kind, saved, current, message):
    state = trained(kind, saved(), moments="8bit", writeback="residual8").state_dict()
    optimizer = trained(kind, current(), moments="8bit", writeback="residual8")
    old_state, state_before = snapshot(optimizer), frozen(state)
    with pytest.raises(ValueError, match=message) as raised:
        optimizer.load_state_dict(state)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    assert snapshot(optimizer) == old_state
    assert frozen(state) == state_before


NUMBERS = {
    "stream": (-5, None, "x", 2**70),
    "step": (-5, float("nan"), None, 0.5),
    "reference": (0, -1),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values]
)
def test_a_state_whose_numbers_are_none_is_refused(name, value):
    """A step would fail by them after it has been counted."""
    weight = fm.FP8Parameter(torch.randn(4, 6), "E4M3")
    optimizer = optim.StiffnessAdamW([weight])
    weight.grad = torch.ones(4, 6)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = saved["state"][0] | {name: value}
    with pytest.raises(ValueError, match=f"has {name}=.* number"):
        optimizer.load_state_dict(saved)


def test_a_parameter_that_was_put_into_two_groups_is_refused():
    weight, bias = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4))
    optimizer = optim.StiffnessAdamW([{"params": [weight]}, {"params": [bias]}])
    optimizer.param_groups[1]["params"].append(weight)
    weight.grad = torch.ones(4, 6)
    with pytest.raises(ValueError, match="appears twice in the groups"):
        optimizer.step()
    assert not optimizer.state


def overlapping(kind):
    """Return two parameters, of which the second lies within the first."""
    if kind == "codes":
        whole = fm.FP8Parameter(torch.randn(4, 6), "E4M3")
        scale = whole.kept_scale[1:]
        return whole, fm.FP8Parameter.from_codes(whole.codes[1:], scale, "E4M3")
    whole = nn.Parameter(torch.zeros(4, 6))
    return whole, nn.Parameter(whole.detach()[1:])


@pytest.mark.parametrize("kind", ["codes", "floats"])
def test_parameters_that_share_memory_are_refused(kind):
    """Threads would step both at the same time."""
    one, other = overlapping(kind)
    with pytest.raises(ValueError, match=r"\(4, 6\) and \(3, 6\) share memory"):
        optim.StiffnessAdamW([one, other])
    optimizer = optim.StiffnessAdamW([one])
    with pytest.raises(ValueError, match="share memory"):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["params"].append(other)
    one.grad = torch.ones(4, 6)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()
    assert not optimizer.state


def test_neighbours_in_one_storage_and_views_between_each_other_are_stepped():
    storage = torch.zeros(48)
    halves = [nn.Parameter(half) for half in storage.view(2, 24)]
    columns = [nn.Parameter(column) for column in torch.zeros(6, 2).unbind(1)]
    weights = [*halves, *columns]
    optimizer = optim.StiffnessAdamW(weights, lr=0.1, weight_decay=0.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.1))


def test_tensors_without_memory_do_not_share_it():
    """The address of each is 0."""
    weights = [nn.Parameter(torch.zeros(4, 6, device="meta")) for _ in range(2)]
    checks.check_memory([{"params": [weight]} for weight in weights])


@pytest.mark.parametrize("kind", ["StiffnessAdamW", "StiffnessSGD", "StiffnessAdafactor"])
def test_tensors_that_hold_others_do_not_reach_native_code(kind):
    """They have no memory of their own: their address is 0."""
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = getattr(optim, kind)([weight])
    weight.grad = TwoTensor(torch.ones(4, 6), torch.ones(4, 6))
    with pytest.raises(ValueError, match="is a TwoTensor, which holds other tensors"):
        optimizer.step()
    assert not optimizer.state
    # what a collective will give is waited for
    weight.grad = AsyncCollectiveTensor(torch.ones(4, 6))
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 6))
    with pytest.raises(ValueError, match="is a TwoTensor, which holds other tensors"):
        getattr(optim, kind)([nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))])


def test_a_state_that_holds_other_tensors_is_refused():
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = optim.StiffnessAdamW([weight])
    weight.grad = torch.ones(4, 6)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = TwoTensor(torch.zeros(4, 6), torch.zeros(4, 6))
    with pytest.raises(ValueError, match="has exp_avg as a TwoTensor"):
        optimizer.step()
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("kind", ["StiffnessAdamW", "StiffnessSGD", "StiffnessAdafactor"])
def test_a_sum_of_gradients_is_stepped_after_the_handle_was_removed(kind):
    """The bits are those of a step inside of it."""
    weights = []
    for steps_inside in (True, False):
        torch.manual_seed(0)
        layer = fm.quantize_model(nn.Linear(8, 8), "E4M3")
        optimizer = getattr(optim, kind)(layer.parameters(), lr=1e-2)
        inputs = torch.randn(2, 4, 8)
        handle = optim.step_in_backward(optimizer, accumulate="bfloat16")
        for x in inputs:
            layer(x).square().mean().backward()
        if not steps_inside:
            handle.remove()
        optimizer.step()
        weights.append(layer.weight.codes.clone())
    assert torch.equal(*weights)
