"""PEFT: adapters that stay floats, merges that are rounded once and said, and a grid
that is never left silently.
"""

import copy
import importlib
import io
import warnings

import geoopt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import fp8manifold as fm
from fp8manifold import dequantize_model, quantize_model

MERGED = (
    r"values assigned to the data of a weight in E4M3 were rounded: merging an adapter this way"
)
OFF = r"\d+ of \d+ weights are off the grid of storage='grid', because something wrote in place"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 32)
        self.fc = nn.Linear(32, 32)
        self.head = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.emb(tokens))))


def quantized_net(storage, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return quantize_model(Net(), "E4M3", storage, **options)


def is_on_grid(layer) -> bool:
    values = layer.weight.detach()
    return torch.equal(layer.manifold.projx(values), values)


@pytest.fixture
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it announces as it is imported
        return importlib.import_module("peft")


#: adapters by name: PEFT's configuration and its options
KINDS = {
    "LoRA": ("LoraConfig", {"r": 4}),
    "LoRA with a bias": ("LoraConfig", {"r": 4, "lora_bias": True}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "LoRA beside a whole head": ("LoraConfig", {"r": 4, "modules_to_save": ["head"]}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "LoKr": ("LoKrConfig", {"r": 4}),
}


def adapted(peft, kind, model, target="fc"):
    name, options = KINDS[kind]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(
            model, getattr(peft, name)(target_modules=[target], **copy.deepcopy(options))
        )
        with torch.no_grad():
            for parameter in wrapped.parameters():
                if parameter.requires_grad and not isinstance(parameter, geoopt.ManifoldParameter):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return wrapped


@pytest.mark.extra("peft")
@pytest.mark.filterwarnings("ignore:Unmerge result can be inaccurate")  # IA3's own
@pytest.mark.parametrize("storage", ["grid", "codes"])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_is_said_and_stays_on_the_grid(kind, safe, storage, peft) -> None:
    model = quantized_net(storage)
    layer = model.fc
    wrapped = adapted(peft, kind, model)
    old_weight = torch.as_tensor(layer.weight.detach().clone())
    with pytest.warns(UserWarning, match=MERGED):
        wrapped.merge_adapter(safe_merge=safe)
    assert not torch.equal(torch.as_tensor(layer.weight.detach()), old_weight)
    assert storage == "codes" or is_on_grid(layer)
    with pytest.warns(UserWarning, match=MERGED):
        wrapped.unmerge_adapter()
    assert storage == "codes" or is_on_grid(layer)
    with pytest.warns(UserWarning, match=MERGED):
        merged = wrapped.merge_and_unload(safe_merge=safe)
    assert type(merged.fc) is fm.QuantizedLinear
    # What is saved is what there is.
    again = quantized_net(storage)
    again.load_state_dict(merged.state_dict())
    assert torch.equal(again(torch.arange(16)), merged(torch.arange(16)))


@pytest.mark.extra("peft")
def test_a_merge_takes_a_scale_that_holds_the_sum(peft) -> None:
    model = quantized_net("grid")
    layer = model.fc
    wrapped = adapted(peft, "LoRA", model)
    adapter = wrapped.base_model.model.fc
    with torch.no_grad():
        adapter.lora_B["default"].weight.mul_(1000)
    wanted = layer.weight.detach() + adapter.get_delta_weight("default").detach()
    with pytest.warns(UserWarning, match=MERGED):
        wrapped.merge_adapter()
    assert is_on_grid(layer)
    row = wanted.abs().amax(1, keepdim=True)
    half_an_ulp = row / 16  # of E4M3 at the end of the range
    assert bool(((layer.weight.detach() - wanted).abs() <= half_an_ulp).all())


@pytest.mark.extra("peft")
def test_adapters_of_an_embedding_in_codes(peft) -> None:
    model = quantized_net("codes", embeddings="E4M3")
    wrapped = adapted(peft, "LoRA", model, "emb")
    old_values = model.emb.weight.dequantize()
    with pytest.warns(UserWarning, match=MERGED):
        merged = wrapped.merge_and_unload()
    assert isinstance(merged.emb.weight, fm.FP8Parameter)
    assert not torch.equal(merged.emb.weight.dequantize(), old_values)


def values_of(layer) -> Tensor:
    return torch.as_tensor(layer.quantized_weight().detach())


@pytest.mark.extra("peft")
@pytest.mark.parametrize("storage", ["grid", "codes"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_merged_and_quantised(kind, storage, peft) -> None:
    decoded = dequantize_model(adapted(peft, kind, quantized_net(storage)).eval())
    expected = decoded(torch.arange(16))
    merged = decoded.merge_and_unload()
    torch.testing.assert_close(merged(torch.arange(16)), expected)
    assert type(merged.fc) is nn.Linear
    alone = nn.Linear(32, 32, bias=False)
    alone.weight = nn.Parameter(merged.fc.weight.detach().clone())
    layer = quantize_model(merged, "E4M3", storage).fc
    layer_alone = quantize_model(alone, "E4M3", storage)
    assert torch.equal(values_of(layer), values_of(layer_alone))


def injected(peft):
    torch.manual_seed(0)
    return peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["fc", "head"]), Net())


def quantized(model: nn.Module) -> set[str]:
    return {
        name for name, module in model.named_modules() if isinstance(module, fm.QuantizedLinear)
    }


#: the layers under the adapters of `injected`
UNDER_ADAPTERS = {"fc.base_layer", "head.base_layer"}


@pytest.mark.extra("peft")
@pytest.mark.parametrize("formats", ["E2M5", {"*": "E2M5"}, {"fc": "E2M5", "head": "E4M3"}])
@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_adapters_stay_and_are_named_once(formats, storage, peft) -> None:
    names = r"fc\.lora_A\.default, fc\.lora_B\.default, head\.lora_A\.default and 1 more"
    with pytest.warns(UserWarning, match=names) as record:
        model = quantize_model(injected(peft), formats, storage=storage)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert "\n" not in str(record[0].message)
    assert quantized(model) == UNDER_ADAPTERS


@pytest.mark.extra("peft")
@pytest.mark.parametrize("formats", [{"base_layer": "E2M5"}, {"*": "E2M5", "lora_*": "none"}])
@pytest.mark.parametrize("storage", ["master", "grid", "codes"])
def test_adapters_that_a_pattern_leaves_out_stay_without_a_warning(formats, storage, peft) -> None:
    assert quantized(quantize_model(injected(peft), formats, storage=storage)) == UNDER_ADAPTERS


@pytest.mark.extra("peft")
@pytest.mark.filterwarnings("ignore:PEFT's adapters, small and trained")
@pytest.mark.parametrize("pattern", ["lora_B", "*.lora_B.*", "head.lora_B.default", "lora_*"])
def test_a_pattern_that_names_them_takes_them(pattern, peft) -> None:
    model = quantize_model(injected(peft), {"*": "E2M5", pattern: "E2M5"}, storage="codes")
    assert "head.lora_B.default" in quantized(model)


@pytest.mark.extra("peft")
def test_an_adapter_of_zeros_that_is_asked_for_learns(peft) -> None:
    """``lora_B`` begins with zeros: its scale is fitted in its first step."""
    model = quantize_model(
        injected(peft), {"base_layer": "E4M3", "lora_*": "E2M5"}, storage="codes"
    )
    b = model.get_submodule("head.lora_B.default").weight
    assert not b.codes.any()
    optimizer = fm.optim.StiffnessAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()
    assert (b.scale <= 2.0**-11).all()
    assert b.codes.any()


def through_a_pickle(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_an_assigned_state(model: nn.Module) -> nn.Module:
    model.load_state_dict(quantized_net("grid").state_dict(), assign=True)
    return model


@pytest.fixture(
    params=[lambda model: model, copy.deepcopy, through_a_pickle, with_an_assigned_state],
    ids=["made", "deepcopy", "pickle", "assigned"],
)
def grid_layer(request) -> fm.QuantizedLinear:
    """A layer on its grid, and copies of it in each way to make them."""
    return request.param(quantized_net("grid")).fc


def test_what_is_assigned_is_rounded(grid_layer) -> None:
    with pytest.warns(UserWarning, match=MERGED):
        grid_layer.weight.data = grid_layer.weight.data * 1.01
    with pytest.warns(UserWarning, match=MERGED):
        grid_layer.weight.data *= 1.01
    assert is_on_grid(grid_layer)


def test_what_is_assigned_beyond_the_range_widens_the_scale(grid_layer) -> None:
    scale = grid_layer.manifold.scale.clone()
    with pytest.warns(UserWarning, match=MERGED):
        grid_layer.weight.data = grid_layer.weight.data * 1001
    assert is_on_grid(grid_layer)
    assert bool((grid_layer.manifold.scale > scale).all())


def test_points_that_are_assigned_stay_in_the_memory_given(grid_layer) -> None:
    points = grid_layer.weight.detach().clone()
    grid_layer.weight.data = points
    assert grid_layer.weight.data_ptr() == points.data_ptr()
    assert torch.equal(grid_layer.weight, points)


@pytest.mark.parametrize("save", ["state_dict", "weight_codes"])
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(1.01),
        lambda weight: weight.data.mul_(1.01),
        nn.init.normal_,
    ],
    ids=["mul_", "data.mul_", "normal_"],
)
def test_weights_off_the_grid_are_not_saved_without_a_warning(write, save) -> None:
    """An operator in place can't be seen; what is saved is looked at."""
    layer = quantized_net("grid").fc
    with torch.no_grad():
        write(layer.weight)
    with pytest.warns(UserWarning, match=OFF):
        getattr(layer, save)()


def test_what_is_computed_from_points_is_nobody_s_grid() -> None:
    layer = parametrizations.spectral_norm(quantized_net("grid").fc)
    layer.state_dict()
    parametrize.remove_parametrizations(layer, "weight")
    with pytest.warns(UserWarning, match=OFF):
        layer.state_dict()
    pruned = quantized_net("grid").fc
    prune.l1_unstructured(pruned, "weight", 0.5)
    pruned.state_dict()
    prune.remove(pruned, "weight")
    assert is_on_grid(pruned)
    assert int((pruned.weight == 0).sum()) >= 512
