"""Collectors: batches of steps, gathered with a policy, for as long as a training takes."""

from aioenvs.collectors.aio import AsyncCollector
from aioenvs.collectors.plain import Collector

__all__ = ["AsyncCollector", "Collector"]
