"""What a caller asks for, checked before anything is sent."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from aioenvs.faces.requests import check_size, read_masks, reset_arguments, rows_of, seeds_of, step_rows

CHAIN = [0, 795726461, 2841183792]


# -- check_size -----------------------------------------------------------------------------------------


def test_a_tensordict_of_the_right_size_passes() -> None:
    check_size(TensorDict({}, [3]), torch.Size([3]))


@pytest.mark.parametrize("shape", [[], [2], [3, 1], [4]])
def test_another_batch_size_is_refused(shape: list[int]) -> None:
    with pytest.raises(RuntimeError) as caught:
        check_size(TensorDict({}, shape), torch.Size([3]))
    assert str(caught.value) == (
        f"Expected a tensordict with shape==env.batch_size, got {torch.Size(shape)} and {torch.Size([3])}"
    )


@pytest.mark.parametrize("thing", [None, {"action": torch.zeros(3)}, torch.zeros(3), 3])
def test_what_is_no_tensordict_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"expected a TensorDict of shape \(3,\), got {type(thing).__name__}"):
        check_size(thing, torch.Size([3]))


# -- masks ----------------------------------------------------------------------------------------------


def reset_rows(td: TensorDict, keys: Any = ("_reset",)) -> Any:
    masks = read_masks(td, {key: torch.Size([*td.batch_size, 1]) for key in keys})
    return rows_of(td, masks, keys)


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.booleans())
def test_a_mask_selects_rows(mask: list[bool], column: bool) -> None:
    tensor = torch.tensor(mask)
    tensor = tensor[:, None] if column else tensor
    td = TensorDict({"_reset": tensor}, [len(mask)])
    for rows in (step_rows(tensor, td.batch_size), reset_rows(td)):
        if all(mask):
            assert rows is None
        else:
            assert rows is not None
            assert rows.tolist() == [row for row, chosen in enumerate(mask) if chosen]
            assert rows.dtype == np.intp


def test_without_a_mask_all_rows_are_selected() -> None:
    assert step_rows(None, torch.Size([2])) is None
    assert reset_rows(TensorDict({"_step": torch.tensor([True, False])}, [2])) is None


MASKS = pytest.mark.parametrize(
    ("mask", "found"),
    [
        (torch.ones(2), r"torch.float32 of shape \(2,\)"),
        (torch.ones(2, dtype=torch.uint8), r"torch.uint8 of shape \(2,\)"),
        (torch.ones(2, 2, dtype=torch.bool), r"torch.bool of shape \(2, 2\)"),
        (torch.ones(2, 1, 1, dtype=torch.bool), r"torch.bool of shape \(2, 1, 1\)"),
        (TensorDict({}, [2]), "TensorDict"),
        (NonTensorData(True, batch_size=[2]), "NonTensorData"),
    ],
    ids=["float", "uint8", "wide", "deep", "nested", "object"],
)


@MASKS
def test_a_reset_mask_of_another_kind_is_refused(mask: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"'_reset' must be a bool tensor of shape \(2,\) or \(2, 1\), got {found}"):
        reset_rows(TensorDict({"_reset": mask}, [2]))


@MASKS
def test_a_step_mask_of_another_kind_is_refused(mask: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"'_step' must be a bool tensor of shape \(2,\) or \(2, 1\), got {found}"):
        step_rows(mask, torch.Size([2]))


def test_a_reset_selects_each_env_of_which_a_part_is_meant() -> None:
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    for shaped in (mask, mask[..., None]):
        rows = reset_rows(TensorDict({"_reset": shaped}, [3, 2]))
        assert rows.tolist() == [1, 2]


def test_a_step_mask_selects_whole_envs_only() -> None:
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    with pytest.raises(ValueError, match=r"must select whole workers, .* part of env 1"):
        step_rows(mask, mask.shape)
    whole = mask.any(1)
    for shaped in (whole, whole[:, None], whole[:, None].expand(3, 2), whole[:, None, None].expand(3, 2, 1)):
        rows = step_rows(shaped, torch.Size([3, 2]))
        assert rows is not None
        assert rows.tolist() == [1, 2]


def test_a_mask_that_counts_needs_its_siblings() -> None:
    keys = [("a", "_reset"), ("b", "_reset")]
    td = TensorDict({"a": {"_reset": torch.tensor([True, False])}}, [2])
    with pytest.raises(ValueError, match="under all of"):
        reset_rows(td, keys)
    td["b", "_reset"] = torch.tensor([False, False])
    assert reset_rows(td, keys).tolist() == [0]


def test_a_mask_at_the_root_stands_for_all() -> None:
    td = TensorDict({"_reset": torch.tensor([True, False])}, [2])
    assert reset_rows(td, [("a", "_reset")]).tolist() == [0]


def test_the_mask_itself_is_not_changed() -> None:
    td = TensorDict({"_reset": torch.tensor([True, False])}, [2])
    reset_rows(td)
    step_rows(td["_reset"], td.batch_size)
    assert td["_reset"].tolist() == [True, False]


# -- seeds ----------------------------------------------------------------------------------------------


def test_an_env_of_several_uses_up_as_many_seeds() -> None:
    assert seeds_of(0, {0: 2, 1: 1}) == ({0: CHAIN[0], 1: CHAIN[2]}, 2309840538)
    assert seeds_of(5, {3: 2, 1: 1}, static=True) == ({3: 5, 1: 5}, 5)


# -- reset_arguments ------------------------------------------------------------------------------------


def counts(num_envs: int) -> dict[int, int]:
    return dict.fromkeys(range(num_envs), 1)


def test_without_arguments_no_env_gets_any() -> None:
    assert reset_arguments(counts(3), None, {}) == {}
    assert reset_arguments(counts(3), [{}, {}, {}], {}) == {}


def test_common_arguments_go_to_all_and_own_ones_win() -> None:
    found = reset_arguments(counts(3), [{}, {"options": 1}, {"other": 2}], {"options": 0})
    assert found == {0: {"options": 0}, 1: {"options": 1}, 2: {"options": 0, "other": 2}}


def test_only_envs_with_arguments_are_named() -> None:
    assert reset_arguments(counts(3), [{}, {"options": 1}, {}], {}) == {1: {"options": 1}}


def test_a_seed_begins_a_chain() -> None:
    assert reset_arguments(counts(3), None, {"seed": 0}) == {env: {"seed": seed} for env, seed in enumerate(CHAIN)}


def test_a_seed_of_ones_own_comes_before_the_chain() -> None:
    found = reset_arguments(counts(3), [{}, {"seed": 7}, {"options": 1}], {"seed": 0})
    assert found == {0: {"seed": CHAIN[0]}, 1: {"seed": 7}, 2: {"seed": CHAIN[2], "options": 1}}


def test_no_seed_is_the_same_as_none_given() -> None:
    assert reset_arguments(counts(2), None, {"seed": None}) == {}
    assert reset_arguments(counts(2), None, {"seed": None, "options": 1}) == {0: {"options": 1}, 1: {"options": 1}}


@pytest.mark.parametrize(("seed", "error"), [(1.5, TypeError), ("1", TypeError), (-1, ValueError)])
def test_a_bad_seed_is_refused(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="a seed must"):
        reset_arguments(counts(2), None, {"seed": seed})


@pytest.mark.parametrize("length", [0, 2, 4])
def test_there_must_be_one_dict_for_each_env(length: int) -> None:
    with pytest.raises(RuntimeError, match=f"one dict for each of 3 envs, but has {length}"):
        reset_arguments(counts(3), [{}] * length, {})


def test_the_callers_dicts_are_not_changed() -> None:
    each: list[dict[str, Any]] = [{"a": 1}, {}]
    common = {"seed": 0, "options": {"b": 2}}
    before = copy.deepcopy((each, common))
    found = reset_arguments(counts(2), each, common)
    found[0]["more"] = found[1]["more"] = 3
    assert (each, common) == before
