"""The contents of the page and of the metrics: sessions, workers, and the last minutes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioenvs.errors import AioEnvsError
from aioenvs.serving.sessions import Session, Sessions

__all__ = ["Live"]

TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
FRESH = 0.5  # seconds for which numbers of workers, and pictures, are good enough for another one who looks
GAUGES = ("capacity", "free", "leased", "returning", "waiting")
COUNTERS = {
    "sessions": "Sessions begun.",
    "episodes": "Episodes begun.",
    "steps": "Steps taken.",
    "refused": "Callers that got no env in time.",
    "failures": "Commands in which an env raised.",
    "deaths": "Commands whose env had died.",
    "stuck": "Workers that were ended since an env was stuck.",
}
ENDS = ("left", "idle", "steps", "seconds", "drained", "ended")


class Live:
    """The state of a server, for whoever looks at it.

    Args:
        sessions: What is looked at.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._workers: list[dict[str, Any]] = []
        self._looked = 0.0
        self._cpu: dict[int, float] = {}
        self._pictures: dict[int, tuple[float, bytes]] = {}
        self._drawing: dict[int, asyncio.Task[bytes]] = {}

    def now(self) -> dict[str, Any]:
        """Return all that the page shows."""
        sessions, history = self._sessions, self._sessions.history
        history.advance()
        now = time.monotonic()
        return {
            "name": sessions.about["name"],
            "renders": sessions.about["renders"],
            "gauges": sessions.gauges(),
            "totals": dict(history.totals),
            "seconds": [[each.time, each.steps, round(each.p50, 2), round(each.p99, 2)] for each in history.seconds],
            "sessions": [
                {
                    "number": each.number,
                    "client": each.client,
                    "env": each.env,
                    "pid": sessions.batch.pid(each.env),
                    "episodes": each.episodes,
                    "steps": each.steps,
                    "episode_return": round(each.episode_return, 3),
                    "idle": round(0.0 if each.asking else now - each.last_asked, 1),
                    "age": round(now - each.began, 1),
                }
                for each in sessions.active
            ],
            "workers": self.workers(),
        }

    def workers(self) -> list[dict[str, Any]]:
        """Return what there is to say of each worker: `pid`, `envs`, `restarts`, `memory` in bytes, and `busy`.

        The last one is the share of one core that it has used since somebody looked before.
        """
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed < FRESH:
            return self._workers
        cpu: dict[int, float] = {}
        self._workers = []
        for worker in self._sessions.batch.workers():
            pid, memory, busy = worker["pid"], None, None
            if (used := _used(pid)) is not None:
                cpu[pid], memory = used
                busy = round(min(1.0, (cpu[pid] - self._cpu[pid]) / elapsed), 3) if pid in self._cpu else None
            envs = worker["envs"]
            self._workers.append({**worker, "envs": len(envs), "memory": memory, "busy": busy})
        self._looked, self._cpu = now, cpu
        return self._workers

    async def picture(self, session: Session) -> bytes:
        """Return the picture of a session as a PNG file; those who look at the same time share it.

        Raises:
            AioEnvsError: If there is none now.
        """
        number = session.number
        drawn = self._pictures.get(number)
        if drawn is not None and time.monotonic() - drawn[0] < FRESH:
            return drawn[1]
        self._pictures = {number: each for number, each in self._pictures.items() if self._sessions.find(number)}
        if number not in self._drawing:
            task = self._drawing[number] = asyncio.create_task(self._draw(session))
            task.add_done_callback(lambda _: self._drawing.pop(number, None))
        return await asyncio.shield(self._drawing[number])

    async def _draw(self, session: Session) -> bytes:
        answer = await session.peek("render", "png")
        if answer.kind != "done":
            raise AioEnvsError("there is no picture")
        picture: bytes = answer.value
        self._pictures[session.number] = (time.monotonic(), picture)
        return picture

    def metrics(self) -> tuple[bytes, str]:
        """Return the metrics in Prometheus' text format, and the name of that."""
        from prometheus_client import CollectorRegistry, exposition

        registry = CollectorRegistry()
        registry.register(_Collector(self))
        return exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST

    def families(self) -> Iterator[Any]:
        """Yield the metrics, as prometheus-client has them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        sessions = self._sessions
        totals = sessions.history.totals
        for name, value in sessions.gauges().items():
            words = "Callers that wait for an env." if name == "waiting" else f"Envs: {name}."
            yield GaugeMetricFamily(f"aioenvs_{name}", words, value=value)
        for name, words in COUNTERS.items():
            yield CounterMetricFamily(f"aioenvs_{name}", words, value=totals[name])
        ended = CounterMetricFamily("aioenvs_sessions_ended", "Sessions that ended.", labels=["reason"])
        for reason in ENDS:
            ended.add_metric([reason], totals[f"ended_{reason}"])
        yield ended
        yield SummaryMetricFamily(
            "aioenvs_step_seconds",
            "How long steps took.",
            count_value=totals["steps"],
            sum_value=sessions.history.step_seconds,
        )
        restarts = CounterMetricFamily("aioenvs_worker_restarts", "Workers that were replaced.", labels=["worker"])
        memory = GaugeMetricFamily("aioenvs_worker_memory_bytes", "Memory of a worker.", labels=["worker"])
        for index, worker in enumerate(self.workers()):
            restarts.add_metric([str(index)], worker["restarts"])
            if worker["memory"] is not None:
                memory.add_metric([str(index)], worker["memory"])
        yield restarts
        yield memory


class _Collector:
    def __init__(self, live: Live) -> None:
        self._live = live

    def collect(self) -> Iterator[Any]:
        return self._live.families()


def _used(pid: int | None) -> tuple[float, int] | None:
    """The seconds of CPU and the bytes of memory that a process has had; None where that is not to be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_SIZE
    except (OSError, ValueError, IndexError):
        return None
    return (int(fields[11]) + int(fields[12])) / TICK, memory
