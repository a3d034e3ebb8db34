"""The options of TorchRL's batches as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["WORKERS", "translated"]

WORKERS = ("mp_start_method", "metadata_from_workers")
WITHOUT_EFFECT = ("metadata_from_workers", "auto_wrap_envs", "policy_proof")


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """TorchRL's options as those of the plain faces.

    Raises:
        ValueError: For `pin_memory=True`, as TorchRL says it.
        RuntimeError: For `memmap=True` with `shared_memory`, as TorchRL says it.
    """
    kept = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
    if kept.pop("pin_memory", False):
        raise ValueError("pin_memory for batched envs is deprecated")
    if kept.get("memmap") and kept.get("shared_memory", True):
        raise RuntimeError(
            "memmap and shared memory are mutually exclusive features; give shared_memory=False with memmap=True"
        )
    return kept
