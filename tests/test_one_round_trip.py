"""What a step of a whole batch runs through in the caller's process: one request, one frame a host, one future."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import aioenvs
from aioenvs import AsyncParallelEnv

PACKAGE = Path(aioenvs.__file__).parent
STEPS = 20


async def calls_of_a_step() -> Counter[tuple[str, str]]:
    """Count Python functions that are called in 20 steps of 32 envs in 2 processes, by file and name."""
    found: Counter[tuple[str, str]] = Counter()
    begun: set[int] = set()  # coroutines count once, not each time that they go on

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and id(frame) not in begun:
            begun.add(id(frame))
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1
        elif event == "return":
            begun.discard(id(frame))

    async with AsyncParallelEnv(32, "CartPole-v1", num_processes=2) as env:
        td = await env.reset(seed=0)
        actions = torch.ones(32, dtype=torch.int64)
        for step in range(STEPS + 5):
            td["action"] = actions
            if step == 5:
                sys.setprofile(note)
            _, td = await env.step_and_maybe_reset(td)
        sys.setprofile(None)
    return found


async def test_a_step_calls_few_functions(capsys: pytest.CaptureFixture[str]) -> None:
    found = await calls_of_a_step()
    own = {place: count for place, count in found.items() if Path(place[0]).is_relative_to(PACKAGE)}
    functions = {name for name in own if "<" not in name[1].rpartition(".")[2]}
    modules = {file for file, _ in functions}
    lines = [f"{sum(found.values()) / STEPS:.0f} calls a step, {len(functions)} functions in {len(modules)} modules"]
    lines += [f"  {Path(file).relative_to(PACKAGE)}: {name}" for file, name in sorted(functions)]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert sum(found.values()) / STEPS <= 200
    assert len(functions) <= 50
    assert len(modules) <= 14
