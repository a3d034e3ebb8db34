"""Which combinations of its parameters a test runs with.

A test of several parameters, such as a face and an env, runs with each value of each parameter, but not with all pairs
of them: one value of every parameter in each case, each of them in some case. So a test of 6 faces and 12 envs has 12
cases. A test marked `every_combination` has the others in the slow tier; elsewhere `pytest --every-combination` runs
them. Of a test whose only parameter is a face, of three or more, the quick tier has one case, of a face that depends
on the test's name, and the slow tier the others: each face has many tests, and each method in `test_every_method`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from faces import Face
from torch_faces import TorchFace

__all__ = ["EVERY_COMBINATION", "beyond_covering", "beyond_one_face", "covering"]

EVERY_COMBINATION = "every_combination"


def beyond_covering(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases without which each value of each parameter of a test is still tried."""
    beyond: list[pytest.Item] = []
    for cases in _tests(items).values():
        kept = covering([_cells(case) for case in cases])
        beyond += [case for at, case in enumerate(cases) if at not in kept]
    return beyond


def beyond_one_face(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of tests over three faces or more, and nothing else, but for one of each test."""
    beyond: list[pytest.Item] = []
    for name, cases in _tests(items).items():
        if len(cases) > 2 and _differ_in_faces(cases) and "test_every_method" not in name:
            kept = zlib.crc32(name.encode()) % len(cases)
            beyond += [case for at, case in enumerate(cases) if at != kept]
    return beyond


def _tests(items: Iterable[pytest.Item]) -> dict[str, list[Any]]:
    """The cases of each test that has parameters."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def _differ_in_faces(cases: list[Any]) -> bool:
    values = [case.callspec.params for case in cases]
    differing = [name for name in values[0] if len({id(each[name]) for each in values}) > 1]
    return len(differing) == 1 and isinstance(values[0][differing[0]], (Face, TorchFace))


def _cells(case: Any) -> tuple[tuple[Any, ...], ...]:
    """The value of each parameter of a case; what one `parametrize` lists together is one value."""
    values = {name: id(value) for name, value in case.callspec.params.items()}  # not all of them can be compared
    cells = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        cells.append((names, *(values.pop(name, None) for name in names)))
    return (*cells, *values.items())


def covering(rows: Sequence[tuple[Any, ...]]) -> set[int]:
    """Return the numbers of some rows that have, together, every cell that there is in any row.

    A row is added for the cells that are still missing, the one first that adds the most, and of those the one whose
    other cells are the rarest so far: a short parameter is spread evenly over a long one.
    """
    used = dict.fromkeys((cell for row in rows for cell in row), 0)
    kept: set[int] = set()
    while missing := {cell for cell, times in used.items() if not times}:

        def gain(at: int, missing: set[Any] = missing) -> tuple[int, int]:
            return sum(cell in missing for cell in rows[at]), -sum(used[cell] for cell in rows[at])

        best = max((at for at in range(len(rows)) if at not in kept), key=gain)
        kept.add(best)
        for cell in rows[best]:
            used[cell] += 1
    return kept
