"""Patches of what has changed: a copy that is patched has the bytes of the model, and a
patch that does not fit changes nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold._served.patch_files import decoded_gaps, encoded_gaps

STEPS = 50


def model(granularity: Any, fmt: str = "E4M3") -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))
    return fm.quantize_model(layers, {"*": fmt}, granularity=granularity, headroom=1.0)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def step(layers: nn.Module, optimizer: Any) -> None:
    x = torch.randn(16, 128)
    # towards larger outputs, so that weights outgrow their scales
    (-layers(x).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
def test_a_patched_copy_has_the_bytes_of_the_model_after_each_of_50_steps(
    granularity: str, tmp_path: Path
) -> None:
    layers = model(granularity)
    optimizer = fm.optim.StiffnessAdamW(layers.parameters(), lr=3e-2)
    weights = fm.served_weights(layers)
    server = {name: tensor.clone() for name, tensor in weights}
    scales = {name: tensor for name, tensor in server.items() if "scale" in name}
    changes = fm.ServedChanges(weights)
    doubled = 0
    for number in range(STEPS):
        step(layers, optimizer)
        patches = changes.since_last()
        before = {name: scale.clone() for name, scale in scales.items()}
        by_file = number % 10 == 9
        if by_file:
            fm.write_changes(tmp_path, patches)
            patches = fm.read_changes(tmp_path)
        fm.apply_changes(server, patches)
        doubled += sum(not torch.equal(scales[name], before[name]) for name in scales)
        assert {name: bits(x) for name, x in server.items()} == {
            name: bits(x) for name, x in weights
        }
    assert doubled > 0
    assert changes.since_last() == []


def test_changes_count_bits_and_not_values() -> None:
    tensors = nn.Sequential(nn.Linear(32, 4))
    layers = fm.quantize_model(tensors, "E4M3")
    codes = layers[0].weight.codes
    codes[0, 0], codes[0, 1] = 0x00, 0x7F
    changes = fm.ServedChanges(fm.served_weights(layers))
    assert changes.since_last() == []
    # +0 becomes -0, and a NaN one of the other sign
    codes[0, 0], codes[0, 1] = 0x80, 0xFF
    (patch,) = changes.since_last()
    assert patch.indices.tolist() == [0, 1]
    assert patch.values.view(torch.uint8).tolist() == [0x80, 0xFF]


def test_a_shadow_takes_a_byte_a_weight() -> None:
    layers = model("square")
    changes = fm.ServedChanges(fm.served_weights(layers))
    codes = [x for x in changes.shadow.values() if x.dtype is torch.float8_e4m3fn]
    assert sum(x.nbytes for x in codes) == 2 * 128 * 128


def test_changes_of_another_shape_ask_for_all_weights() -> None:
    layers = model("channel")
    changes = fm.ServedChanges(fm.served_weights(layers))
    layers[0] = fm.quantize_model(nn.Sequential(nn.Linear(64, 128)), "E4M3")[0]
    with pytest.raises(ValueError, match=r"'0\.weight' is .*\(128, 64\).* send all weights"):
        changes.since_last()


def test_each_of_two_has_what_changed_since_its_own_last_time() -> None:
    layers = model("channel")
    optimizer = fm.optim.StiffnessAdamW(layers.parameters(), lr=3e-2)
    weights = fm.served_weights(layers)
    servers = []
    for _ in range(2):
        servers.append((fm.ServedChanges(weights), {n: x.clone() for n, x in weights}))
        step(layers, optimizer)
    for changes, server in servers:
        fm.apply_changes(server, changes.since_last())
        assert {name: bits(x) for name, x in server.items()} == {
            name: bits(x) for name, x in weights
        }


def test_a_parameter_may_be_replaced_between_two_syncs() -> None:
    layers = model("channel")
    weights = fm.served_weights(layers)
    changes, server = fm.ServedChanges(weights), {n: x.clone() for n, x in weights}
    layers[0].weight = fm.FP8Parameter(torch.randn(128, 128), "E4M3", granularity="channel")
    patches = changes.since_last()
    assert {patch.name for patch in patches} == {"0.weight", "0.weight_scale"}
    fm.apply_changes(server, patches)
    assert {name: bits(x) for name, x in server.items()} == {name: bits(x) for name, x in weights}


def test_a_round_that_raised_is_told_again() -> None:
    layers = model("channel")
    weights = fm.served_weights(layers)
    changes, server = fm.ServedChanges(weights), {n: x.clone() for n, x in weights}
    layers[0].weight.codes[3, 5] ^= 1
    layers[1].bfloat16()
    with pytest.raises(ValueError, match=r"'1\.weight' is .*bfloat16.* send all weights"):
        changes.since_last()
    layers[1].float()
    fm.apply_changes(server, changes.since_last())
    assert {name: bits(x) for name, x in server.items()} == {name: bits(x) for name, x in weights}


def test_a_tensor_that_is_gone_asks_for_all_weights() -> None:
    layers = model("channel")
    changes = fm.ServedChanges(fm.served_weights(layers))
    layers[2].bias = None
    with pytest.raises(ValueError, match=r"'2\.bias' is no longer there: send all weights"):
        changes.since_last()


def test_changes_of_no_served_weights_are_refused() -> None:
    weights: Any = model("channel")
    with pytest.raises(TypeError, match=r"those of fm\.served_weights\(model\), not Sequential"):
        fm.ServedChanges(weights)


def patch_of(**parts: Any) -> fm.Patch:
    whole = {
        "name": "w",
        "shape": (4, 4),
        "dtype": torch.uint8,
        "indices": torch.tensor([1, 5], dtype=torch.int32),
        "values": torch.tensor([7, 8], dtype=torch.uint8),
    }
    return fm.Patch(**whole | parts)


MISFITS = {
    "another name": ({"name": "v"}, "there is no tensor 'v', for which there is a patch"),
    "another shape": ({"shape": (2, 8)}, r"shape \(2, 8\), but the tensor is"),
    "another dtype": (
        {"dtype": torch.int8, "values": torch.tensor([1, 2], dtype=torch.int8)},
        "torch.int8 of shape .* but the tensor is torch.uint8",
    ),
    "an index too high": ({"indices": torch.tensor([1, 16])}, "from 1 to 16: ascending ones"),
    "an index below 0": ({"indices": torch.tensor([-1, 3])}, "from -1 to 3: ascending ones"),
    "an index twice": ({"indices": torch.tensor([3, 3])}, "ascending ones from 0 to 15"),
    "floats for indices": ({"indices": torch.tensor([1.0, 2.0])}, "indices of torch.float32"),
    "fewer values": ({"values": torch.tensor([1], dtype=torch.uint8)}, "has 1 values of"),
    "values of another dtype": ({"values": torch.tensor([1, 2])}, "2 values of torch.int64"),
    "a matrix of indices": ({"indices": torch.tensor([[1, 2]])}, "one dimension"),
}


@pytest.mark.parametrize(("parts", "error"), MISFITS.values(), ids=MISFITS)
def test_a_patch_that_does_not_fit_is_refused_and_nothing_half_applied(
    parts: dict[str, Any], error: str
) -> None:
    tensors = {"w": torch.zeros(4, 4, dtype=torch.uint8)}
    with pytest.raises((TypeError, ValueError), match=error) as caught:
        fm.apply_changes(tensors, [patch_of(), patch_of(**parts)])
    assert "\n" not in str(caught.value)
    assert not tensors["w"].any()


@pytest.mark.parametrize(
    ("target", "patches", "error"),
    [
        pytest.param({}, [("w", 1)], r"must be an fm\.Patch, not tuple", id="no patch"),
        pytest.param(nn.Linear(2, 2), [patch_of()], "target must be .*, not Linear", id="a model"),
    ],
)
def test_what_can_not_be_patched_is_refused(target: Any, patches: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error) as caught:
        fm.apply_changes(target, patches)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    tensors = {"w": torch.zeros(4, 4, dtype=torch.uint8).t()[:, ::1]}
    tensors["w"] = torch.zeros(4, 8, dtype=torch.uint8)[:, ::2]
    with pytest.raises(ValueError, match="not contiguous"):
        fm.apply_changes(tensors, [patch_of()])


def test_a_weight_in_codes_is_refused() -> None:
    weight = fm.FP8Tensor(torch.ones(4, 4), "E4M3")
    patch = patch_of(dtype=torch.float32, values=torch.tensor([7.0, 8.0]))
    with pytest.raises(TypeError, match="'w' is a model's weight in codes"):
        fm.apply_changes({"w": weight}, [patch])


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2**21, 2**40])
def test_gaps_of_any_length_come_back(size: int) -> None:
    indices = torch.tensor([size, size + 1, 2 * size + 3])
    stream = encoded_gaps(indices)
    decoded = decoded_gaps(stream, 3, 2 * size + 4)
    assert decoded is not None
    assert decoded.tolist() == indices.tolist()
    # by the definition, byte for byte
    expected = []
    for gap in (size, 0, size + 1):
        while gap >= 128:
            expected.append(gap % 128 + 128)
            gap //= 128
        expected.append(gap)
    assert stream.tolist() == expected


def test_no_changes_are_a_file_too(tmp_path: Path) -> None:
    fm.write_changes(tmp_path / "sub", [])
    assert fm.read_changes(tmp_path / "sub") == []
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["changes.safetensors"]


def rewritten(change: Callable[[dict[str, Tensor]], Any], folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    fm.write_changes(folder, [patch_of()])
    tensors = load_file(folder / "changes.safetensors")
    change(tensors)
    save_file(tensors, folder / "changes.safetensors")


def listed(*entries: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)


DAMAGED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "no list": lambda t: t.pop("changes"),
    "a list of no JSON": lambda t: t.update(changes=torch.zeros(3, dtype=torch.uint8)),
    "a shape that is none": lambda t: t.update(changes=listed(["w", "4"])),
    "a negative size": lambda t: t.update(changes=listed(["w", [-4, 4]])),
    "one patch more": lambda t: t.update(changes=listed(["w", [4, 4]], ["v", [4, 4]])),
    "a tensor more": lambda t: t.update(more=torch.zeros(1)),
    "places beyond the tensor": lambda t: t.update(changes=listed(["w", [1, 2]])),
    "a gap without its end": lambda t: t.update(
        {"0.gaps": torch.tensor([1, 200], dtype=torch.uint8)}
    ),
    "a gap of ten bytes": lambda t: t.update(
        {"0.gaps": torch.tensor([1] + [255] * 9 + [1], dtype=torch.uint8)}
    ),
    "fewer places": lambda t: t.update({"0.gaps": torch.tensor([1], dtype=torch.uint8)}),
    "places that are floats": lambda t: t.update({"0.gaps": torch.tensor([1.0, 3.0])}),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(change: Any, tmp_path: Path) -> None:
    rewritten(change, tmp_path)
    with pytest.raises(ValueError, match=r"changes\.safetensors' ") as caught:
        fm.read_changes(tmp_path)
    assert "\n" not in str(caught.value)


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    fm.write_changes(tmp_path, [patch_of()])
    path = tmp_path / "changes.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        fm.read_changes(tmp_path)


def saved_and_trained(folder: Path) -> tuple[nn.Module, list[fm.Patch]]:
    """Save a model's served tensors in two files; return it a step later with the patches."""
    layers = model("channel")
    weights = fm.served_weights(layers)
    tensors = {name: tensor.clone() for name, tensor in weights}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        path = folder / f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, path, metadata={"format": "pt"})
    changes = fm.ServedChanges(weights)
    step(layers, fm.optim.StiffnessAdamW(layers.parameters(), lr=3e-2))
    return layers, changes.since_last()


def content(folder: Path) -> dict[str, bytes]:
    files: dict[str, Tensor] = {}
    for path in folder.glob("model-*.safetensors"):
        files |= load_file(path)
    return {name: bits(tensor) for name, tensor in files.items()}


def test_a_patched_folder_has_the_bytes_of_the_model(tmp_path: Path) -> None:
    layers, patches = saved_and_trained(tmp_path)
    # as a server has it that shares the folder with the patches
    fm.write_changes(tmp_path, patches)
    fm.apply_changes(tmp_path, fm.read_changes(tmp_path))
    assert content(tmp_path) == {name: bits(x) for name, x in fm.served_weights(layers)}
    with safe_open(tmp_path / "model-0.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    names = ["changes.safetensors", "model-0.safetensors", "model-1.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_folder_whose_patching_was_cut_short_is_whole_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, patches = saved_and_trained(tmp_path)
    replace, before = Path.replace, content(tmp_path)
    replaced: list[Path] = []

    def replace_one(self: Path, target: Path) -> Path:
        if replaced:
            raise OSError("no space left")
        replaced.append(target)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_one)
    with pytest.raises(OSError, match="no space left"):
        fm.apply_changes(tmp_path, patches)
    monkeypatch.undo()
    after = {name: bits(x) for name, x in fm.served_weights(layers)}
    assert content(tmp_path) not in (before, after)
    fm.apply_changes(tmp_path, patches)
    assert content(tmp_path) == after
    names = ["model-0.safetensors", "model-1.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("where", ["safetensors.torch.save_file", "os.replace"])
def test_a_write_that_was_cut_short_leaves_the_earlier_changes(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fm.write_changes(tmp_path, [patch_of()])

    def cut_short(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(where, cut_short)
    with pytest.raises(OSError, match="no space left"):
        fm.write_changes(tmp_path, [patch_of(name="v")])
    monkeypatch.undo()
    assert [patch.name for patch in fm.read_changes(tmp_path)] == ["w"]
    assert [path.name for path in tmp_path.iterdir()] == ["changes.safetensors"]


def test_a_folder_that_a_patch_does_not_fit_is_left_as_it_was(tmp_path: Path) -> None:
    _, patches = saved_and_trained(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="there is no tensor 'other'"):
        fm.apply_changes(tmp_path, [*patches, patches[0]._replace(name="other")])
    assert content(tmp_path) == before
    with pytest.raises(FileNotFoundError, match="has no weights"):
        fm.apply_changes(tmp_path / "nowhere", patches)
