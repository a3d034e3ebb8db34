"""Gymnasium ids, and what is registered under them."""

import sys
from pathlib import Path

import gymnasium
import pytest

from aioenvs import ParallelEnv
from aioenvs.registry import find_spec


@pytest.mark.parametrize(
    ("env_id", "found"),
    [("CartPole-v1", "CartPole-v1"), ("CartPole", "CartPole-v1"), ("gymnasium:Pendulum-v1", "Pendulum-v1")],
)
def test_an_id_is_found(env_id: str, found: str) -> None:
    assert find_spec(env_id).id == found


def test_a_module_in_front_is_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brings_an_env.py").write_text(
        "import gymnasium\ngymnasium.register('Brought-v3', entry_point='gymnasium.envs.classic_control:CartPoleEnv')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert find_spec("brings_an_env:Brought-v3").id == "Brought-v3"
    finally:
        gymnasium.registry.pop("Brought-v3", None)
        sys.modules.pop("brings_an_env", None)


@pytest.mark.parametrize(
    ("env_id", "error", "message"),
    [
        ("CartPoel-v1", gymnasium.error.NameNotFound, "Did you mean: `CartPole`"),
        ("CartPole-v99", gymnasium.error.VersionNotFound, "v99"),
        ("", gymnasium.error.Error, "Malformed"),
        ("no_such_module:X-v0", ImportError, "cannot import 'no_such_module': ModuleNotFoundError"),
        (":X-v0", ImportError, "cannot import ''"),
    ],
)
def test_an_unknown_id_is_explained(env_id: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_spec(env_id)


def test_an_unknown_namespace_says_how_to_import_it() -> None:
    with pytest.raises(gymnasium.error.NamespaceNotFound) as caught:
        find_spec("NoSuchNamespace/Pong-v5")
    assert "package:NoSuchNamespace/Pong-v5" in caught.value.__notes__[0]


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'aioenvs\[gym\]'") as caught:
        find_spec("CartPole-v1")
    assert caught.value.name == "gymnasium"


class _Unreadable:
    """Makes an env here, and cannot be unpickled anywhere."""

    def __call__(self, **_: object) -> gymnasium.Env:
        raise NotImplementedError

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_an_id_that_workers_cannot_read_harms_no_other() -> None:
    gymnasium.register("Unreadable-v0", entry_point=_Unreadable())
    try:
        with ParallelEnv(1, "CartPole-v1") as env:
            assert env.reset()["observation"].shape == (1, 4)
        with pytest.raises(ValueError, match="no number"):
            ParallelEnv(1, "Unreadable-v0").start()
    finally:
        gymnasium.registry.pop("Unreadable-v0")
