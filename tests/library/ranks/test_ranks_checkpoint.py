"""Distributed checkpoints of rows: saved by two processes, loaded by one, two or three,
which go on to the bit.

Their digest: one number for any number of processes, which no damage to the state or
its files leaves.
"""

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optimizer_cases import bits_of, normal
from rank_cases import model, refusal, seeds, stored
from test_ranks_fsdp import check_same, own_rows, put_equal_gradients, sharded
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException

import fp8manifold as fm
from fp8manifold.distributed import check_digest, digest

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="distributed checkpoints of torch 2.8 ask for a storage"
)


KINDS = {
    "adamw": (
        fm.optim.StiffnessAdamW,
        {"lr": 0.01, "writeback": "residual8", "moments": "8bit", "refresh_every": 3},
    ),
    "muon": (
        fm.optim.StiffnessMuon.for_model,
        {"lr": 0.02, "moments": "8bit", "writeback": "residual8"},
    ),
    "lion": (fm.optim.StiffnessLion, {"lr": 0.01, "writeback": "residual8", "draws": "dither"}),
    "momentum": (
        fm.optim.StiffnessAdamW,
        {"lr": 0.01, "writeback": "momentum", "moments": "bfloat16"},
    ),
    "blocks": (fm.optim.StiffnessAdamW, {"lr": 0.05, "writeback": "stochastic", "moments": "8bit"}),
    "adafactor": (
        fm.optim.StiffnessAdafactor,
        {"lr": 0.1, "momentum": 0.9, "moments": "8bit", "writeback": "residual8"},
    ),
    "riemannian": (
        fm.optim.RiemannianAdam,
        {"float_lr": 0.01, "writeback": "stochastic", "amsgrad": True},
    ),
}


def optimizer_of(kind, net):
    make, options = KINDS[kind]
    # `StiffnessMuon.for_model` takes the model, the others its parameters.
    return make(net if "Muon" in str(make) else net.parameters(), **options)


def prepared(kind, seed):
    """Return a sharded model, the same one whole, and an optimizer of each."""
    parts, whole = (model("block" if kind == "blocks" else "channel", seed=seed) for _ in range(2))
    parts = sharded(parts)
    return parts, whole, optimizer_of(kind, parts), optimizer_of(kind, whole)


def step_on(parts, whole, optimizers, steps):
    for step in steps:
        put_equal_gradients(parts, whole, step)
        for optimizer in optimizers:
            optimizer.step()


def saved(kind, folder, flat, background):
    parts, whole, *optimizers = prepared(kind, 0)
    step_on(parts, whole, optimizers, range(3))
    options = states.StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(
        zip(
            ("model", "optimizer"),
            states.get_state_dict(parts, optimizers[0], options=options),
            strict=True,
        )
    )
    if background:
        apart = dist.new_group()  # the steps' own collectives go on meanwhile
        future = dcp.async_save(state, checkpoint_id=folder, process_group=apart)
        step_on(parts, whole, optimizers, range(3, 4))  # what is saved has been copied by now
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)


def loaded(kind, folder, flat):
    """Another model takes the state and goes on as the one that was never saved."""
    _, whole, _, whole_optimizer = prepared(kind, 0)
    for step in range(3):
        step_whole((whole,), (whole_optimizer,), step)
    parts, _, part_optimizer, _ = prepared(kind, 5)
    options = states.StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optimizer = states.get_state_dict(parts, part_optimizer, options=options)
    dcp.load({"model": state, "optimizer": optimizer}, checkpoint_id=folder)
    states.set_state_dict(
        parts, part_optimizer, model_state_dict=state, optim_state_dict=optimizer, options=options
    )
    check_same(parts, whole, seeds=False)
    step_on(parts, whole, (part_optimizer, whole_optimizer), range(3, 6))
    check_same(parts, whole, seeds=False)
    return sorted(
        type(value).__name__ for value in part_optimizer.state[next(parts.parameters())].values()
    )


def step_whole(nets, optimizers, step):
    for net, optimizer in zip(nets, optimizers, strict=True):
        for i, q in enumerate(net.parameters()):
            q.grad = normal(*q.shape, seed=1000 * step + i, std=0.3).to(q.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "flat", "background"),
    [
        ("adamw", False, False),
        ("adamw", True, True),
        ("muon", True, False),
        ("momentum", False, False),
        ("lion", False, False),
        ("blocks", False, True),
        ("riemannian", True, False),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_saved_by_two_loaded_by_any_number(pools, tmp_path, kind, flat, background, size):
    pools[2].run(saved, kind, str(tmp_path), flat, background)
    assert "DTensor" in pools[size].run(loaded, kind, str(tmp_path), flat)[0]


def states_of(parts, optimizer):
    """As the page takes them: the optimizer's first, whose residual takes the remainders."""
    optimizer_state = states.get_optimizer_state_dict(parts, optimizer)
    return {"model": states.get_model_state_dict(parts), "optimizer": optimizer_state}


def prepared_with_remainder(kind, seed):
    parts, whole = (model(seed=seed, keep_remainder=True) for _ in range(2))
    parts = sharded(parts)
    return parts, whole, optimizer_of(kind, parts), optimizer_of(kind, whole)


def saved_with_remainder(kind, folder, steps):
    parts, whole, *optimizers = prepared_with_remainder(kind, 0)
    step_on(parts, whole, optimizers, range(steps))
    dcp.save(states_of(parts, optimizers[0]), checkpoint_id=folder)


def loaded_with_remainder(kind, folder, steps):
    _, whole, _, whole_optimizer = prepared_with_remainder(kind, 0)
    for step in range(steps):
        step_whole((whole,), (whole_optimizer,), step)
    parts, _, part_optimizer, _ = prepared_with_remainder(kind, 5)
    state = states_of(parts, part_optimizer)
    dcp.load(state, checkpoint_id=folder)
    states.set_state_dict(
        parts, part_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step_on(parts, whole, (part_optimizer, whole_optimizer), range(steps, steps + 3))
    check_same(parts, whole, seeds=False)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_model_with_remainders_resumes(pools, tmp_path, kind, steps):
    pools[2].run(saved_with_remainder, kind, str(tmp_path), steps)
    for size in (1, 2, 3):
        pools[size].run(loaded_with_remainder, kind, str(tmp_path), steps)


def gathered(kind):
    """Full states of rows are those of the whole, and load into a model of one process,
    which goes on.
    """
    parts, whole, *optimizers = prepared(kind, 0)
    step_on(parts, whole, optimizers, range(3))
    options = states.StateDictOptions(full_state_dict=True)
    state = states.get_model_state_dict(parts, options=options)
    assert {type(x) for x in state.values()} == {Tensor}
    assert {name: bits_of(x) for name, x in state.items()} == stored(whole)
    optimizer = states.get_optimizer_state_dict(parts, optimizers[0], options=options)
    plain = model(seed=5)
    plain.load_state_dict(state)
    assert (stored(plain), seeds(plain)) == (stored(whole), seeds(whole))
    goes_on = optimizer_of(kind, plain)
    states.set_optimizer_state_dict(plain, goes_on, optimizer, options=options)
    for step in range(3, 5):
        step_whole((plain, whole), (goes_on, optimizers[1]), step)
    assert stored(plain) == stored(whole)


@pytest.mark.parametrize("kind", ["adamw", "riemannian"])
def test_full_states_are_the_wholes(pools, kind):
    pools[2].run(gathered, kind)


def taken_whole(broadcast):
    """Load a full state into shards by torch's helper, and return this rank's error.

    The shards have the codes of the state then, or their own where it is refused.
    """
    parts, whole, source = sharded(model(seed=0)), model(seed=0), model(seed=3)
    state = source.state_dict() if dist.get_rank() == 0 or not broadcast else {}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    message = refusal(lambda: states.set_model_state_dict(parts, state, options=options))
    for index, (p, q) in enumerate(
        zip(parts.parameters(), (whole if broadcast else source).parameters(), strict=True)
    ):
        if isinstance(q, fm.FP8Tensor):
            assert torch.equal(p._local_tensor.codes, own_rows(q.codes, p._local_tensor)), index
            assert p._local_tensor.seed == q.seed, index
    return message


@pytest.mark.parametrize("broadcast", [True, False])
def test_a_full_state_into_shards_is_taken_or_refused_in_every_rank(pools, broadcast):
    for message in pools[2].run(taken_whole, broadcast, limit=60):
        assert "write to a sharded FP8Tensor" in message if broadcast else not message
        assert "\n" not in message


def cut(kind, from_rows):
    """Rows of a whole model and of a whole state, or of one that rows had been gathered
    to, go on as the whole.
    """
    parts, whole, part_optimizer, whole_optimizer = prepared(kind, 0)
    _, twin, _, twin_optimizer = prepared(kind, 5)
    twins = list(zip(twin.parameters(), whole.parameters(), strict=True))
    for step in range(3):
        put_equal_gradients(parts, whole, step)
        for p, q in twins:
            p.grad = q.grad.clone()
        for optimizer in (part_optimizer, whole_optimizer, twin_optimizer):
            optimizer.step()
    alone, stepping = (whole, whole_optimizer) if from_rows else (twin, twin_optimizer)
    state = get_whole(part_optimizer) if from_rows else twin_optimizer.state_dict()
    # load_state_dict takes whole codes too: they are cut in one of the two cases.
    rows_of_model, left_whole = parts.state_dict(), torch.uint8 if from_rows else None
    rows = {
        name: fm.distributed.rows_of(x, rows_of_model[name])
        for name, x in alone.state_dict().items()
        if x.dtype != left_whole
    }
    parts.load_state_dict(alone.state_dict() | rows)
    part_optimizer.load_state_dict(fm.optim.rows_of_state(state, part_optimizer))
    check_same(parts, alone, seeds=False)
    step_on(parts, alone, (part_optimizer, stepping), range(3, 6))
    check_same(parts, alone, seeds=False)


def get_whole(optimizer):
    state = optimizer.state_dict()
    entries = {
        index: {
            name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return state | {"state": entries}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("from_rows", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_from_the_whole(pools, kind, from_rows, size):
    pools[size].run(cut, kind, from_rows)


def filled():
    """A model that was sharded before it had values takes whole codes, and its own rows
    of the rest.
    """
    with torch.device("meta"):
        parts = model(seed=5)
    parts = sharded(parts).to_empty(device="cpu")
    whole, rows_of_model = model(seed=0), parts.state_dict()
    parts.load_state_dict(
        {
            name: fm.distributed.rows_of(x, rows_of_model[name])
            for name, x in whole.state_dict().items()
        }
    )
    check_same(parts, whole)


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_made_on_meta_is_sharded_and_filled(pools, size):
    pools[size].run(filled)


FLIPS = 60


def state_of(kind, seed, *, whole=False):
    parts, all_of_it, part_optimizer, whole_optimizer = prepared(kind, seed)
    step_on(parts, all_of_it, (part_optimizer, whole_optimizer), range(2))
    model, optimizer = states.get_state_dict(
        all_of_it if whole else parts, whole_optimizer if whole else part_optimizer
    )
    return {"model": model, "optimizer": optimizer}


def digests(kind):
    return [int(digest(state_of(kind, 0, whole=whole))) for whole in (False, True)]


@pytest.mark.parametrize("kind", ["adamw", "muon", "riemannian"])
def test_rows_have_the_digest_of_the_whole(pools, kind):
    all_digests = set()
    for size in (1, 2, 3):
        for digests_of_rank in pools[size].run(digests, kind):
            all_digests |= set(digests_of_rank)
    assert len(all_digests) == 1


def tensors(value):
    value = getattr(value, "_local_tensor", value)
    if isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, Tensor):
        yield value


def plain_state():
    values = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.ParameterDict({"w": fm.FP8Parameter(values, "E4M3", seed=1)}).state_dict()
    vector = torch.randn(5, generator=torch.Generator().manual_seed(1))
    return {
        "model": {
            **weight,
            "b": vector,
            "half": vector.bfloat16(),
            "wide": vector.double(),
            "flag": torch.ones(3) > 0,
        },
        "optimizer": {
            "step": torch.tensor(3.0),
            "lr": 0.1,
            "name": "x",
            "none": None,
            "betas": (0.9, 0.99),
        },
    }


def with_digest():
    state = plain_state()
    return state | {"digest": digest(state)}


def test_a_digest_changes_with_every_bit():
    state, random = with_digest(), Random(0)
    check_digest(state)
    known_digests = {int(state["digest"])}
    for tensor in tensors({key: state[key] for key in ("model", "optimizer")}):
        flat = tensor.detach().reshape(-1)
        flat = flat.view(torch.uint8) if tensor.dtype is not torch.bool else flat
        for _ in range(12):
            place = random.randrange(flat.numel())
            old_value = flat[place].clone()
            flat[place] = (
                ~old_value if flat.dtype is torch.bool else old_value ^ (1 << random.randrange(8))
            )
            with pytest.raises(RuntimeError, match="what was read is damaged"):
                check_digest(state)
            known_digests.add(int(digest(state)))
            flat[place] = old_value
    check_digest(state)
    assert len(known_digests) > 80  # no two damages look alike, but for those that were drawn twice


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
    with pytest.raises(RuntimeError, match="what was read is damaged"):
        check_digest(state)


def test_what_has_no_digest_is_refused():
    with pytest.raises(ValueError, match=r"no digest: save state\['digest'\] ="):
        check_digest(plain_state())
    with pytest.raises(TypeError, match=r"state entry 'a/b' has type object"):
        digest({"a": {"b": object()}})


def saved_with_digest(folder, kind):
    state = state_of(kind, 0)
    dcp.save(state | {"digest": digest(state)}, checkpoint_id=folder)


def load_state(folder, kind):
    state = state_of(kind, 5) | {"digest": torch.zeros((), dtype=torch.int64)}
    dcp.load(state, checkpoint_id=folder)
    return state


def flipped(folder, kind, copies):
    """Read the files of two processes with one bit flipped at a time; what became of
    it.
    """
    good, random, outcomes = (
        [*map(bits_of, tensors(load_state(folder, kind)))],
        Random(1),
        Counter(),
    )
    files = [*3 * sorted(Path(folder).glob("*.distcp")), Path(folder) / ".metadata"]
    for turn in range(FLIPS):
        bad = Path(copies) / str(turn)
        shutil.copytree(folder, bad)
        path = bad / files[turn % len(files)].name
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        try:
            state = load_state(str(bad), kind)
        except (Exception, CheckpointException):  # the latter is none
            outcomes["by torch"] += 1
            continue
        try:
            check_digest(state)
        except RuntimeError:
            outcomes["by the digest"] += 1
            continue
        assert [*map(bits_of, tensors(state))] == good, path.name
        outcomes["the same"] += 1
    return outcomes


def test_no_flipped_bit_is_read_as_a_number(pools, tmp_path):
    pools[2].run(saved_with_digest, str(tmp_path / "whole"), "muon")
    (outcomes,) = pools[1].run(flipped, str(tmp_path / "whole"), "muon", str(tmp_path), limit=400)
    print("bits flipped in a distributed checkpoint:", outcomes)
    assert sum(outcomes.values()) == FLIPS
    assert outcomes["by the digest"] > 0


def killed_while_saving(folder, kind):
    """The last process dies when it has written its part, before all is said to be
    whole.
    """
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
    pools[2].run(saved_with_digest, str(tmp_path / "before"), "muon")
    with pytest.raises(AssertionError, match="died"):
        pools[2].run(killed_while_saving, str(tmp_path / "killed"), "muon")
    assert pools[1].run(outcome, str(tmp_path / "killed"), "muon") == ["CheckpointException"]
    assert pools[1].run(outcome, str(tmp_path / "before"), "muon") == [""]


def outcome(folder, kind):
    """Return the name of the error of reading and checking a checkpoint, or ""."""
    try:
        check_digest(load_state(folder, kind))
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
            try:
                state = with_digest()
                for number in range(10_000):
                    dcp.save(state, checkpoint_id=tmp_path / f"{turn}-{number}", no_dist=True)
            finally:
                # an error would go on as a second session of the tests
                os._exit(1)
        deadline = time.monotonic() + 120
        while not (tmp_path / f"{turn}-0" / ".metadata").exists():
            assert time.monotonic() < deadline, "no save was completed"
            time.sleep(0.01)
        time.sleep(random.random() * 0.3)
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
    # Of the last two saves of a turn one at least was whole before it was killed.
    assert whole >= 12
