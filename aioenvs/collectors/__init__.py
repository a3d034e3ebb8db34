"""Collectors: batches of steps, gathered with a policy, for as long as a training takes."""

from aioenvs.collectors.async_collector import AsyncCollector
from aioenvs.collectors.collector import Collector

__all__ = ["AsyncCollector", "Collector"]
