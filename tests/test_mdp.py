"""From one step's TensorDict to the next step's root."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from aioenvs import step_mdp


def a_step(**root: torch.Tensor) -> TensorDict:
    """What `step` leaves behind for two envs."""
    return TensorDict(
        {
            "observation": torch.zeros(2, 3),
            "done": torch.zeros(2, 1, dtype=torch.bool),
            "action": torch.ones(2),
            "next": {
                "observation": torch.ones(2, 3),
                "reward": torch.full((2, 1), 5.0),
                "done": torch.ones(2, 1, dtype=torch.bool),
            },
            **root,
        },
        [2],
    )


def test_what_came_next_becomes_the_root() -> None:
    root = step_mdp(a_step())
    assert set(root.keys()) == {"observation", "done"}
    assert (root["observation"] == 1).all()
    assert root["done"].all()


def test_other_keys_of_the_root_stay() -> None:
    root = step_mdp(a_step(env_index=torch.arange(2), hidden=torch.ones(2, 7)))
    assert set(root.keys()) == {"observation", "done", "env_index", "hidden"}
    assert root["env_index"].tolist() == [0, 1]


def test_keys_that_came_next_win_and_new_ones_are_taken_over() -> None:
    td = a_step(hidden=torch.zeros(2))
    td["next", "hidden"] = torch.ones(2)
    td["next", "log_prob"] = torch.full((2,), 3.0)
    root = step_mdp(td)
    assert root["hidden"].tolist() == [1, 1]
    assert root["log_prob"].tolist() == [3, 3]


@pytest.mark.parametrize("name", ["_reset", "_step", "reward", "action"])
def test_what_belongs_to_one_step_is_left_out(name: str) -> None:
    assert name not in step_mdp(a_step(**{name: torch.ones(2, dtype=torch.bool)}))


def test_nested_keys_and_objects_are_taken_over() -> None:
    td = a_step()
    td["agent"] = TensorDict({"state": torch.zeros(2)}, [2])
    td["next", "agent"] = TensorDict({"state": torch.ones(2)}, [2])
    td["next", "text"] = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    root = step_mdp(td)
    assert root["agent", "state"].tolist() == [1, 1]
    assert root.get("text").tolist() == ["a", "b"]


def test_nothing_is_copied_and_the_step_stays_as_it_was() -> None:
    td = a_step(hidden=torch.ones(2))
    before = td.clone()
    root = step_mdp(td)
    assert root["observation"].data_ptr() == td["next", "observation"].data_ptr()
    assert root["hidden"].data_ptr() == td["hidden"].data_ptr()
    root["extra"] = torch.ones(2)
    assert (td == before).all()
    assert set(td.keys(True)) == set(before.keys(True))


@pytest.mark.parametrize("batch", [[], [2], [2, 3]])
def test_any_batch_size(batch: list[int]) -> None:
    td = TensorDict({"action": torch.zeros(batch), "next": {"observation": torch.ones(*batch, 4)}}, batch)
    root = step_mdp(td)
    assert root.batch_size == torch.Size(batch)
    assert root["observation"].shape == (*batch, 4)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_device_stays(device: str | None) -> None:
    td = a_step()
    td = td.to(device) if device is not None else td
    assert step_mdp(td).device == (torch.device(device) if device is not None else None)


def test_a_locked_step_gives_a_root_that_can_be_changed() -> None:
    root = step_mdp(a_step().lock_())
    root["action"] = torch.ones(2)
    assert "action" in root


def test_gradients_pass() -> None:
    td = a_step()
    weight = torch.ones(2, 3, requires_grad=True)
    td["next", "observation"] = weight * 2
    step_mdp(td)["observation"].sum().backward()
    assert (weight.grad == 2).all()


def test_without_a_step_there_is_no_next_root() -> None:
    with pytest.raises(KeyError, match="next"):
        step_mdp(TensorDict({"observation": torch.zeros(2)}, [2]))
