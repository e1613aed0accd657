"""The digest of a state: one number for any number of processes, which no damage to the state or its files leaves."""

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import bits_of
from test_ranks_checkpoint import prepared, step_on
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

import fp8manifold as fm
from fp8manifold.distributed import check_digest, digest

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="distributed checkpoints of torch 2.8 ask for a storage"
)
FLIPS = 60


def state_of(kind, seed, *, whole=False):
    parts, all_of_it, ours, its = prepared(kind, seed)
    step_on(parts, all_of_it, (ours, its), range(2))
    model, optimizer = get_state_dict(all_of_it if whole else parts, its if whole else ours)
    return {"model": model, "optimizer": optimizer}


def digests(kind):
    return [int(digest(state_of(kind, 0, whole=whole))) for whole in (False, True)]


@pytest.mark.parametrize("kind", ["adamw", "muon", "riemannian"])
def test_rows_have_the_digest_of_the_whole(pools, kind):
    assert len({one for size in (1, 2, 3) for found in pools[size].run(digests, kind) for one in found}) == 1


def tensors(value):
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, Tensor):
        yield value


def plain_state():
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.ParameterDict({"w": fm.FP8Parameter(values, "E4M3", seed=1)}).state_dict()
    other = torch.randn(5, generator=torch.Generator().manual_seed(1))
    return {
        "model": {**weight, "b": other, "half": other.bfloat16(), "wide": other.double(), "flag": torch.ones(3) > 0},
        "optimizer": {"step": torch.tensor(3.0), "lr": 0.1, "name": "x", "none": None, "betas": (0.9, 0.99)},
    }


def with_digest():
    state = plain_state()
    return state | {"digest": digest(state)}


def test_every_bit_counts():
    state, random = with_digest(), Random(0)
    check_digest(state)
    seen = {int(state["digest"])}
    for tensor in tensors({key: state[key] for key in ("model", "optimizer")}):
        flat = tensor.detach().reshape(-1)
        flat = flat.view(torch.uint8) if tensor.dtype is not torch.bool else flat
        for _ in range(12):
            place = random.randrange(flat.numel())
            before = flat[place].clone()
            flat[place] = ~before if flat.dtype is torch.bool else before ^ (1 << random.randrange(8))
            with pytest.raises(RuntimeError, match="what was read is damaged"):
                check_digest(state)
            seen.add(int(digest(state)))
            flat[place] = before
    check_digest(state)
    assert len(seen) > 80  # no two damages look alike, but for those that were drawn twice


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"].update(b=s["model"]["b"].flip(0)),
        lambda s: s["model"].update(b=s["model"]["b"].reshape(5, 1)),
        lambda s: s["model"].pop("half"),
        lambda s: s["model"].update(c=torch.zeros(0)),
        lambda s: s["model"].update(b=s["model"]["wide"], wide=s["model"]["b"]),
        lambda s: s["optimizer"].update(lr=0.2),
        lambda s: s["optimizer"].update(betas=(0.99, 0.9)),
        lambda s: s["optimizer"].update(none=0),
    ],
)
def test_names_shapes_and_places_count(change):
    state = with_digest()
    change(state)
    with pytest.raises(RuntimeError):
        check_digest(state)


def test_what_has_no_digest_is_refused():
    with pytest.raises(ValueError, match=r"no digest: save state\['digest'\] ="):
        check_digest(plain_state())
    with pytest.raises(TypeError, match=r"state entry 'a/b' is of object"):
        digest({"a": {"b": object()}})


def saved(folder, kind):
    state = state_of(kind, 0)
    dcp.save(state | {"digest": digest(state)}, checkpoint_id=folder)


def read(folder, kind):
    state = state_of(kind, 5) | {"digest": torch.zeros((), dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder)
    return state


def flipped(folder, kind, copies):
    """Read the files of two processes with one bit flipped at a time; what became of it."""
    good, random, found = [*map(bits_of, tensors(read(folder, kind)))], Random(1), Counter()
    files = [*3 * sorted(Path(folder).glob("*.distcp")), Path(folder) / ".metadata"]
    for turn in range(FLIPS):
        bad = Path(copies) / str(turn)
        shutil.copytree(folder, bad)
        path = bad / files[turn % len(files)].name
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            state = read(str(bad), kind)
        except (Exception, CheckpointException):  # the latter is none
            found["by torch"] += 1
            continue
        try:
            check_digest(state)
        except RuntimeError:
            found["by the digest"] += 1
            continue
        assert [*map(bits_of, tensors(state))] == good, path.name
        found["the same"] += 1
    return found


def test_no_flipped_bit_is_read_as_a_number(pools, tmp_path):
    pools[2].run(saved, str(tmp_path / "whole"), "muon")
    (found,) = pools[1].run(flipped, str(tmp_path / "whole"), "muon", str(tmp_path), limit=400)
    print("bits flipped in a distributed checkpoint:", found)
    assert sum(found.values()) == FLIPS
    assert found["by the digest"] > 0


def killed_while_saving(folder, kind):
    """The last process dies when it has written its part, before all is said to be whole."""
    state = state_of(kind, 0)

    class Dying(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            future = super().write_data(plan, planner)
            future.wait()
            if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return future

    dcp.save(state | {"digest": digest(state)}, storage_writer=Dying(folder))


def test_a_save_that_a_kill_has_ended_is_none(pools, tmp_path):
    pools[2].run(saved, str(tmp_path / "before"), "muon")
    with pytest.raises(AssertionError, match="died"):
        pools[2].run(killed_while_saving, str(tmp_path / "killed"), "muon")
    assert pools[1].run(outcome, str(tmp_path / "killed"), "muon") == ["CheckpointException"]
    assert pools[1].run(outcome, str(tmp_path / "before"), "muon") == [""]


def outcome(folder, kind):
    try:
        check_digest(read(folder, kind))
    except (Exception, CheckpointException) as error:
        return type(error).__name__
    return ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_process_killed_at_any_moment_leaves_whole_saves_or_none(tmp_path):
    random, folders = Random(2), []
    for turn in range(12):
        child = os.fork()
        if child == 0:
            state = with_digest()
            for number in range(10_000):
                dcp.save(state, checkpoint_id=tmp_path / f"{turn}-{number}", no_dist=True)
        time.sleep(0.3 + random.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        folders += sorted(tmp_path.glob(f"{turn}-*"), key=lambda path: path.stat().st_mtime)[-2:]
    whole = 0
    for folder in folders:
        state = plain_state() | {"digest": torch.zeros((), dtype=torch.int64)}
        state["model"]["b"].zero_()
        if not (folder / ".metadata").exists():
            with pytest.raises(CheckpointException):
                dcp.load(state, checkpoint_id=folder, no_dist=True)
            continue
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        check_digest(state)
        whole += 1
    assert whole > 6
