"""The dress for TorchRL over TorchRL's own envs of every kind of data: as TorchRL's SerialEnv, step by step."""

from __future__ import annotations

import pytest
from oracle import TORCHRL_MARKS, Library
from test_oracle_batches import CASES, Case, assert_same, known, manners_of, run
from torch_faces import TorchFace

pytestmark = [*TORCHRL_MARKS, pytest.mark.every_combination]

DRESSED = Library(
    "aioenvs for torchrl",
    {
        "root": "aioenvs.integrations.torchrl",
        "envs": "torchrl.envs",
        "utils": "torchrl.envs.utils",
        "specs": "torchrl.data",
        "toys": "torchrl_toys",
    },
)
FACES = [
    TorchFace("dressed-serial", "SerialEnv", 0, {}, DRESSED),
    TorchFace("dressed-packed", "ParallelEnv", 2, {}, DRESSED),
    TorchFace("dressed-unbuffered", "ParallelEnv", 2, {"use_buffers": False}, DRESSED),
]


@pytest.mark.parametrize("face", FACES, ids=repr)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.slow
async def test_the_same_as_torchrl(face: TorchFace, case: Case) -> None:
    manners = manners_of(case, agreed=True)
    assert_same(await run(face, case, manners), await known("torchrl-serial", case, manners))
