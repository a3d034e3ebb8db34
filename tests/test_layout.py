"""What lies where in the block: nothing overlaps, everything is aligned, nothing is lost."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioenvs.engine.layout import ALIGNMENT, Arrays, Layout, Leaf

NAMES = st.text("abc", min_size=1, max_size=2)
DTYPES = st.one_of(  # any that has a fixed size
    st.sampled_from(["|b1", "|u1", "<i2", "<f4", "<i8", "<f8", "<c16", "<U3", ">i4"]),
    hnp.scalar_dtypes().map(lambda dtype: dtype.str),
    st.one_of(hnp.byte_string_dtypes(min_len=1), hnp.unicode_string_dtypes(min_len=1)).map(lambda dtype: dtype.str),
)
LEAVES = st.lists(
    st.builds(
        Leaf,
        key=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
        dtype=DTYPES,
        shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=5,
    unique_by=lambda leaf: leaf.key,
)
REGIONS = st.dictionaries(NAMES, LEAVES, max_size=3)
NUM_ENVS = st.integers(1, 5)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def flat(arrays: dict[str, Arrays]) -> list[np.ndarray]:
    return [array for region in arrays.values() for array in region.values()]


def raw(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, to read and write."""
    return array.reshape(-1).view(np.uint8)


def laid_out(num_envs: int, leaves: dict[str, list[Leaf]]) -> tuple[Layout, np.ndarray, dict[str, Arrays]]:
    layout = Layout.of(num_envs, leaves)
    block = np.zeros(max(1, layout.end), np.uint8)
    return layout, block, layout.arrays(memoryview(block))


@given(NUM_ENVS, REGIONS)
def test_arrays_have_the_shape_and_dtype_of_their_leaves(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    _, _, arrays = laid_out(num_envs, leaves)
    assert list(arrays) == list(leaves)
    for region, members in leaves.items():
        assert list(arrays[region]) == [leaf.key for leaf in members]
        for leaf in members:
            array = arrays[region][leaf.key]
            assert array.shape == (num_envs, *leaf.shape)
            assert array.dtype == np.dtype(leaf.dtype)
            assert array.nbytes == num_envs * leaf.nbytes
            assert array.flags.c_contiguous
            assert array.flags.writeable


@given(NUM_ENVS, REGIONS)
def test_no_leaf_touches_another(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    _, block, arrays = laid_out(num_envs, leaves)
    everything = [array for array in flat(arrays) if array.size]
    for number, array in enumerate(everything, start=1):
        assert not raw(array).any()
        raw(array)[...] = number
    for number, array in enumerate(everything, start=1):
        assert (raw(array) == number).all()
    assert np.count_nonzero(block) == sum(array.nbytes for array in everything)


@given(NUM_ENVS, REGIONS)
def test_leaves_and_regions_are_aligned_and_inside(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    layout, block, arrays = laid_out(num_envs, leaves)
    assert layout.end % ALIGNMENT == 0
    for name, region in layout.regions.items():
        assert region.offset % ALIGNMENT == 0
        for place in region.places:
            assert place.offset % ALIGNMENT == 0
            assert place.offset + num_envs * place.leaf.nbytes <= region.nbytes
            array = arrays[name][place.leaf.key]
            if array.size:
                assert address(array) - address(block) == region.offset + place.offset


@given(NUM_ENVS, REGIONS)
def test_regions_follow_one_another_without_gaps(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    layout = Layout.of(num_envs, leaves)
    regions = list(layout.regions.values())
    ends = [0, *(region.offset + region.nbytes for region in regions)]
    assert [region.offset for region in regions] == ends[:-1]
    assert layout.end == ends[-1]


@given(NUM_ENVS, REGIONS)
def test_a_region_can_be_read_from_a_copy_of_its_bytes(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    layout, block, arrays = laid_out(num_envs, leaves)
    block[...] = np.arange(len(block)) % 2  # bytes that are also valid bools and characters
    for name, region in layout.regions.items():
        copy = bytearray(block[region.offset : region.offset + region.nbytes].tobytes())
        views = region.views(copy, num_envs)
        assert views.keys() == arrays[name].keys()
        for key, view in views.items():
            assert view.tobytes() == arrays[name][key].tobytes()


@given(NUM_ENVS, REGIONS)
def test_the_same_leaves_give_the_same_layout(num_envs: int, leaves: dict[str, list[Leaf]]) -> None:
    assert Layout.of(num_envs, leaves) == Layout.of(num_envs, {name: iter(group) for name, group in leaves.items()})


def test_an_example() -> None:
    leaves = {
        "next": [Leaf(("observation",), "<f4", (4,)), Leaf(("reward",), "<f4", ())],
        "root": [Leaf(("a",), "|b1", ())],
    }
    layout = Layout.of(5, leaves)
    assert [(place.leaf.key, place.offset) for place in layout.regions["next"].places] == [
        (("observation",), 0),
        (("reward",), 128),
    ]
    assert [(region.offset, region.nbytes) for region in layout.regions.values()] == [(0, 192), (192, 64)]
    assert layout.end == 256


def test_envs_of_a_leaf_are_rows() -> None:
    _, block, arrays = laid_out(3, {"next": [Leaf(("reward",), "|u1", (2,))]})
    arrays["next"][("reward",)][1] = [8, 9]
    assert block[:6].tolist() == [0, 0, 8, 9, 0, 0]


@pytest.mark.parametrize(("shape", "nbytes"), [((), 8), ((3,), 24), ((2, 0, 5), 0)])
def test_a_leaf_knows_its_size(shape: tuple[int, ...], nbytes: int) -> None:
    assert Leaf(("x",), "<f8", shape).nbytes == nbytes


def test_leaves_without_bytes_take_no_room() -> None:
    layout, _, arrays = laid_out(4, {"a": [Leaf(("x",), "<f4", (0,)), Leaf(("y",), "<f4", (3, 0))], "b": []})
    assert layout.end == 0
    assert [array.shape for array in flat(arrays)] == [(4, 0), (4, 3, 0)]
    assert arrays["b"] == {}


def test_a_key_that_comes_twice_is_refused() -> None:
    twice = [Leaf(("a", "b"), "<f4", (1,)), Leaf(("a", "b"), "<f4", (2,))]
    with pytest.raises(ValueError, match=r"region 'next' has the key \('a', 'b'\) twice"):
        Layout.of(1, {"next": twice})
    assert Layout.of(1, {"next": twice[:1], "root": twice[1:]}).end == 2 * ALIGNMENT


@pytest.mark.parametrize("dtype", ["O", "U", "<U0", "S0", "V0"])
def test_a_dtype_without_a_fixed_size_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"\('x',\) has the dtype '{dtype}', which has no fixed size"):
        Layout.of(1, {"next": [Leaf(("x",), dtype, ())]})


def test_too_small_a_buffer_is_refused() -> None:
    layout = Layout.of(2, {"a": [Leaf(("x",), "<f4", (16,))]})
    with pytest.raises(TypeError, match="too small"):
        layout.arrays(bytearray(layout.end - 1))


def test_pairs_of_leaves_do_not_share_memory() -> None:
    _, _, arrays = laid_out(3, {"a": [Leaf((name,), "|u1", (3,)) for name in "xyz"]})
    assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(flat(arrays), 2))
