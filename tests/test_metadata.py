"""What envs say of themselves: which may be stored together, where they lie, and what has changed."""

import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioenvs.engine.layout import (
    ALIGNMENT,
    INPUT,
    LATEST,
    NEXT,
    ROOT,
    STATUS,
    EnvMetadata,
    Key,
    Leaf,
    check_unchanged,
    find_collision,
    form_families,
    interned,
)
from aioenvs.errors import SpecMismatchError

KINDS = st.integers(0, 3)  # of envs
KEYS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple)


def metadata(kind: int = 0, **changes: Any) -> EnvMetadata:
    """An env of some kind."""
    observation = (Leaf(("observation",), "<f4", (kind, 3)),)
    description = EnvMetadata(
        name=f"Env{kind}",
        leaves={INPUT: (Leaf(("action",), "<i8", ()),), NEXT: observation, ROOT: observation},
        objects={INPUT: {}, NEXT: {("text",): None}, ROOT: {}},
        reward_keys=(("reward",),),
        done_keys=(("done",),),
        specs={"action": {("action",): (0, kind)}, "observation": {"low": -1, "high": kind}},
    )
    return dataclasses.replace(description, **changes)


@given(st.lists(KINDS, min_size=1, max_size=12))
def test_families_are_the_envs_of_one_structure(kinds: list[int]) -> None:
    families = form_families([metadata(kind) for kind in kinds])
    assert sorted(env for family in families for env in family.envs) == list(range(len(kinds)))
    assert [kinds[family.envs[0]] for family in families] == list(dict.fromkeys(kinds))
    for family in families:
        assert list(family.envs) == sorted(family.envs)
        assert {kinds[env] for env in family.envs} == {kinds[family.envs[0]]}
        assert family.metadata == metadata(kinds[family.envs[0]])
        assert family.layout.num_envs == len(family.envs)


@given(st.lists(KINDS, min_size=1, max_size=12))
def test_families_lie_one_after_the_other(kinds: list[int]) -> None:
    families = form_families(interned(metadata(kind) for kind in kinds))
    block = bytearray(families[-1].layout.end)
    end = 0
    for number, family in enumerate(families, start=1):
        offsets = [region.offset for region in family.layout.regions.values()]
        assert offsets[0] == end
        assert end % ALIGNMENT == 0
        end = family.layout.end
        for arrays in family.layout.arrays(block).values():
            for array in arrays.values():
                array[...] = number
    for number, family in enumerate(families, start=1):
        arrays = family.layout.arrays(block)
        assert arrays[STATUS][LATEST].shape == (len(family.envs),)
        assert all((array == number).all() for region in arrays.values() for array in region.values())
    assert end == len(block)


@given(st.lists(KINDS, max_size=12))
def test_equal_descriptions_become_one_object(kinds: list[int]) -> None:
    descriptions = [metadata(kind) for kind in kinds]
    shared = interned(descriptions)
    assert shared == descriptions
    assert len({id(each) for each in shared}) == len(set(kinds))
    assert all(a is b for a, b in zip(interned(shared), shared, strict=True))


CHANGES: dict[str, Any] = {
    "leaves": {**metadata().leaves, ROOT: ()},
    "objects": {**metadata().objects, NEXT: {}},
    "reward_keys": (),
    "done_keys": (("done",), ("agent", "done")),
    "takes_root": True,
    "shows_root": True,
    "free_states": True,
    "kinds": ("torch.bfloat16",),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_structure_consists_of(name: str) -> None:
    changed = metadata(**{name: CHANGES[name]})
    assert changed.structure != metadata().structure
    assert len(form_families([metadata(), changed, metadata()])) == 2
    with pytest.raises(SpecMismatchError, match="env 4 was built anew and differs from what it was"):
        check_unchanged(4, metadata(), changed)


@pytest.mark.parametrize("name", ["name", "specs", "num_seeds"])
def test_what_is_no_matter_of_structure(name: str) -> None:
    changed = metadata(**{name: {"name": "other", "specs": {}, "num_seeds": 5}[name]})
    assert changed.structure == metadata().structure


def test_the_order_of_regions_and_the_type_of_a_mapping_do_not_count() -> None:
    leaves = dict(reversed(metadata().leaves.items()))
    assert metadata(leaves=leaves).structure == metadata().structure


def test_an_env_that_is_the_same_passes() -> None:
    check_unchanged(1, metadata(), metadata(name="another name"))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (
            {"action": {("action",): (0, 9)}, "observation": {"low": -1, "high": 0}},
            "expected (0, 0) as 'action' ('action',), found (0, 9)",
        ),
        (
            {"action": {("action",): (0, 0)}, "observation": {"low": -1}},
            "expected ['high', 'low'] as 'observation' keys, found ['low']",
        ),
        ({"action": {("action",): (0, 0)}}, "expected ['action', 'observation'] as keys, found ['action']"),
    ],
)
def test_the_first_difference_of_specs_is_named(specs: Any, words: str) -> None:
    with pytest.raises(SpecMismatchError) as caught:
        check_unchanged(1, metadata(), metadata(specs=specs))
    assert words in str(caught.value)
    assert "a factory must always make the same kind of env" in str(caught.value)


@pytest.mark.parametrize("changes", [{"takes_root": True}, {"specs": OrderedDict(reversed(metadata().specs.items()))}])
def test_what_differs_otherwise_is_called_structure(changes: Any) -> None:
    known = metadata(specs=OrderedDict(metadata().specs))
    with pytest.raises(SpecMismatchError, match="expected 'Env0' as structure, found 'Env0'"):
        check_unchanged(0, known, metadata(**changes))


@given(st.lists(KEYS, max_size=4), st.lists(KEYS, max_size=4))
def test_a_collision_is_a_key_that_is_part_of_another(observation: list[Key], reserved: list[Key]) -> None:
    found = find_collision(observation, reserved)
    hidden = [key for key in observation if any(overlap(key, other) for other in reserved)]
    assert found == (hidden[0] if hidden else None)


def overlap(one: Key, other: Key) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def test_a_dtype_of_its_own_is_a_structure_of_its_own() -> None:
    names = [np.dtype(kind).str for kind in ("f2", "f4", "f8", "i4", "b1")]
    kinds = [metadata(leaves={ROOT: (Leaf(("x",), name, (2,)),)}) for name in names]
    assert [family.envs for family in form_families(kinds + kinds)] == [(i, i + 5) for i in range(5)]
