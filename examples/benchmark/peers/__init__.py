"""The systems that are compared, one module for each library; libraries that are absent are left out."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from systems import System

__all__ = ["PEERS", "Peer", "load"]


@dataclass(frozen=True)
class Peer:
    """A library that has systems.

    Attributes:
        name: As on the command line.
        module: Where its drivers are.
        requires: What must be importable.
        distribution: Where its version stands.
        imports: What a caller imports before the clock of a start-up runs.
    """

    name: str
    module: str
    requires: str
    distribution: str
    imports: Sequence[str] = ()

    def missing(self) -> str | None:
        """Why it cannot take part, if so."""
        return None if importlib.util.find_spec(self.requires) else f"{self.requires} is not installed"

    @property
    def version(self) -> str:
        """The version that is installed."""
        return importlib.metadata.version(self.distribution)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("floor", "floor", "numpy", "numpy", ("uvloop",)),
        Peer(
            "aioenvs",
            "aioenvs_faces",
            "aioenvs",
            "aioenvs",
            ("aioenvs.faces.async_envs", "aioenvs.faces.sync_envs", "uvloop"),
        ),
        Peer("layers", "aioenvs_layers", "aioenvs", "aioenvs"),
        Peer("gymnasium", "gymnasium_vector", "gymnasium", "gymnasium"),
        Peer("sb3", "sb3_vector", "stable_baselines3", "stable-baselines3", ("stable_baselines3.common.vec_env",)),
        Peer("torchrl", "torchrl_envs", "torchrl", "torchrl", ("torchrl.envs",)),
        Peer(
            "pufferlib", "pufferlib_vector", "pufferlib", "pufferlib-core", ("pufferlib.vector", "pufferlib.emulation")
        ),
        Peer("envpool", "envpool_native", "envpool", "envpool", ("envpool",)),
    )
}


def load(peer: str) -> Sequence[System]:
    """Return the systems of a library; it is not imported yet."""
    found: Sequence[System] = importlib.import_module(f"peers.{PEERS[peer].module}").SYSTEMS
    return found
