"""Hooks around an optimizer's loading and saving: what they change is what counts."""

import copy
from typing import Any

import pytest
import torch
from family_cases import NAMES, make
from optimizer_cases import normal, put_gradients, stored_weight

import fp8manifold as fm

by_name = pytest.mark.parametrize("name", NAMES)


def stepped(name: str) -> tuple[torch.nn.Parameter, Any]:
    p = stored_weight("E4M3", (3, 8), seed=1)
    optimizer = make(name, [p])
    put_gradients([p], 0)
    optimizer.step()
    return p, optimizer


def averages(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.shape == (3, 8)]


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "in place"])
@by_name
def test_what_a_hook_makes_of_a_state_is_loaded(name: str, returns: bool) -> None:
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    names = averages(saved["state"][0])

    def double(_: Any, state: dict[str, Any]) -> Any:
        changed = copy.deepcopy(state)
        for key in names:
            changed["state"][0][key] *= 2
        changed["skipped_steps"] = 7
        state.update(changed)
        return changed if returns else None

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(saved)
    assert names
    assert all(torch.equal(optimizer.state[p][key], 2 * saved["state"][0][key]) for key in names)
    assert optimizer.skipped_steps == 7


@by_name
def test_what_a_hook_makes_of_a_state_is_checked(name: str) -> None:
    """A hook may mend a state that would be refused, and one that it breaks is refused before anything changes."""
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key, *_ = averages(saved["state"][0])
    kept = optimizer.state[p][key].clone()
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state["state"][0].update({key: torch.ones(2)})
    )
    with pytest.raises(ValueError, match=f"has {key} of shape"):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert torch.equal(optimizer.state[p][key], kept)
    handle.remove()
    mended = saved["state"][0][key]
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["state"][0].update({key: mended}))
    foreign = copy.deepcopy(saved)
    foreign["state"][0][key] = torch.ones(2)
    optimizer.load_state_dict(foreign)
    assert torch.equal(optimizer.state[p][key], kept)


@by_name
def test_hooks_after_the_loading_have_the_last_word(name: str) -> None:
    p, optimizer = stepped(name)
    saved = copy.deepcopy(optimizer.state_dict())
    key, *_ = averages(saved["state"][0])
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[p][key].zero_())
    optimizer.load_state_dict(saved)
    assert optimizer.state[p][key].count_nonzero() == 0


def test_a_wrapper_has_hooks_of_its_own() -> None:
    p = torch.nn.Parameter(normal(2, 2))
    wrapper, seen = fm.optim.StiffnessWrapper(torch.optim.SGD([p], lr=0.1)), []
    wrapper.register_state_dict_pre_hook(lambda o: seen.append(type(o)))
    wrapper.register_state_dict_post_hook(lambda _, state: state | {"steps_taken": 3})
    wrapper.register_load_state_dict_pre_hook(lambda _, state: state | {"steps_taken": state["steps_taken"] + 1})
    wrapper.register_load_state_dict_post_hook(lambda o: seen.append(o.steps_taken))
    saved = wrapper.state_dict()
    wrapper.load_state_dict(saved)
    assert (saved["steps_taken"], seen) == (3, [fm.optim.StiffnessWrapper, 4])
