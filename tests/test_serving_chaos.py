"""Some thousand operations of clients that behave badly; `serving_chaos.py` does as many as one likes."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
pytest.importorskip("msgpack")

from serving_chaos import run


@pytest.mark.slow
async def test_bad_clients_and_dying_workers_leave_every_env_free_and_every_answer_right() -> None:
    done = await run(3000, seed=1)
    assert done["kill"] > 0
    assert done["vanish"] > 0
