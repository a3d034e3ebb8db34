"""Collectors: batches of steps, gathered with a policy, for as long as a training takes."""

from aioenvs.collectors.collector import AsyncCollector, Collector

__all__ = ["AsyncCollector", "Collector"]
