"""The layers of the package, read from its imports; and the public names, which load on first use."""

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import aioenvs

PACKAGE = Path(aioenvs.__file__).parent
MODULES = {
    ".".join((path.parent if path.stem == "__init__" else path.with_suffix("")).relative_to(PACKAGE.parent).parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

PURE = {
    *(f"aioenvs.engine.{name}" for name in ("protocol", "layout", "env_states", "double_buffer")),
    "aioenvs.errors",
    "aioenvs.hints",
}

# Lowest first. A module belongs to the longest prefix of its name that stands here, and imports nothing from above.
LAYERS = (
    ("aioenvs.errors", "aioenvs.hints", "aioenvs.registry"),
    (
        "aioenvs.engine.protocol",
        "aioenvs.engine.layout",
        "aioenvs.engine.env_states",
        "aioenvs.engine.double_buffer",
    ),
    ("aioenvs.engine",),
    ("aioenvs.specs", "aioenvs.anything"),
    ("aioenvs.tensors",),
    ("aioenvs.envs",),
    ("aioenvs.faces",),
    ("aioenvs.collectors", "aioenvs.integrations", "aioenvs.testing"),
    ("aioenvs",),  # the lazy root: whoever imports it can reach every face
    ("aioenvs.serving",),
    ("aioenvs.cli",),
    ("aioenvs.__main__",),
)
RANKS = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}

INPUT_OUTPUT = {
    "_posixshmem",
    "asyncio",
    "concurrent",
    "fcntl",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "select",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uvloop",
}
ASYNCIO = {
    "aioenvs.engine.portal",
    "aioenvs.engine.waiting",
    "aioenvs.engine.worker.concurrent",
    "aioenvs.engine.worker.plain_thread",
}
ASYNC_PARTS = (
    "aioenvs.engine.pools",
    "aioenvs.faces",
    "aioenvs.tensors.rollout",
    "aioenvs.cli",
    "aioenvs.collectors",
    "aioenvs.integrations",
    "aioenvs.serving",
)
# These only pickle what `multiprocessing` shares, as it does.
SENDING = {"aioenvs.engine.worker.descriptors", "aioenvs.engine.pools.factories"}
FORKING = {"aioenvs.engine.pools.launching", "aioenvs.engine.pools.launcher"}


class Import(NamedTuple):
    """One import statement's target, as a dotted name.

    Attributes:
        top: Whether it runs when the module is imported.
        typing: Whether it is there for type checkers only.
    """

    target: str
    top: bool
    typing: bool = False

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def every_import_of(module: str) -> tuple[Import, ...]:
    """All imports of a module, those inside functions and those for type checkers included."""
    return tuple(_imports(parse(module), module, top=True))


def imports_of(module: str) -> tuple[Import, ...]:
    """All imports of a module that can run: those inside functions, too."""
    return tuple(found for found in every_import_of(module) if not found.typing)


def _imports(node: ast.AST, module: str, top: bool, typing: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        checked = typing or is_type_checking(child)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, top, checked) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = _origin(child, module)
            for alias in child.names:
                name = f"{origin}.{alias.name}"
                yield Import(name if name in MODULES else origin, top, checked)
        inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(child, module, top and not inner, checked)


def _origin(statement: ast.ImportFrom, module: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    if MODULES[module].stem != "__init__":
        parts.pop()
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def rank(module: str) -> int:
    """The number of a module's layer."""
    parts = module.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), min(len(parts), 2) - 1, -1)]
    found = next((prefix for prefix in prefixes if prefix in RANKS), None)
    assert found is not None, f"{module} has no layer yet: give it one in LAYERS"
    return RANKS[found]


def own_imports(module: str) -> list[Import]:
    return [found for found in imports_of(module) if found.package == "aioenvs"]


def test_the_reader_of_imports_finds_them_wherever_they_stand() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import gymnasium\n"
        "try:\n    import numpy as np\nexcept ImportError:\n    pass\n"
        "from . import errors\n"
        "class A:\n    async def f(self):\n        from ..specs import base, Composite\n"
    )
    found = set(_imports(ast.parse(source), "aioenvs.faces.steps", top=True))
    assert found == {
        Import("gymnasium", True, True),
        Import("typing", True),
        Import("numpy", True),
        Import("aioenvs.faces", True),
        Import("aioenvs.specs.base", False),
        Import("aioenvs.specs", False),
    }


def test_a_module_imports_only_from_its_own_layer_and_below() -> None:
    above = [
        (module, found.target)
        for module in MODULES
        for found in own_imports(module)
        if rank(found.target) > rank(module)
    ]
    assert above == []


def test_no_imports_go_in_circles() -> None:
    """Neither those that run when a module is imported, nor those inside functions or for type checkers.

    The lazy tables of packages, which name what lies below them for type checkers, are the one exception.
    """
    graph = {
        module: {
            found.target
            for found in every_import_of(module)
            if found.package == "aioenvs" and found.target != module and not (found.typing and is_lazy(module))
        }
        for module in MODULES
        if module != "aioenvs"
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("aioenvs.errors") < order.index("aioenvs.engine.env_states")
    assert order.index("aioenvs.engine.env_states") < order.index("aioenvs.faces.async_envs")


def is_lazy(module: str) -> bool:
    """Whether a package loads its names when they are first used."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in parse(module).body)


def test_no_folder_shows_more_than_twelve_modules() -> None:
    shown = Counter(path.parent for path in MODULES.values() if path.stem != "__init__")
    assert {folder.name: count for folder, count in shown.items() if count > 12} == {}


def test_no_module_is_longer_than_600_lines() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 600} == {}


def test_docstrings_begin_with_their_subject_or_their_verb() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    guessed = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for line in [(ast.get_docstring(node) or "").partition("\n")[0]]
        if line.startswith(("What ", "The same ", "Whether it "))
    ]
    assert guessed == []


def test_the_engine_knows_neither_torch_nor_a_face() -> None:
    engine = [module for module in MODULES if module.startswith("aioenvs.engine")]
    foreign = [
        (module, found.target)
        for module in engine
        for found in imports_of(module)
        if found.package in ("torch", "tensordict", "torchrl")
        or (found.package == "aioenvs" and not found.target.startswith(("aioenvs.engine", *LAYERS[0])))
    ]
    assert len(engine) > 10
    assert foreign == []


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_do_no_input_or_output(module: str) -> None:
    assert INPUT_OUTPUT.isdisjoint(found.package for found in imports_of(module))
    calls = {
        node.func.id
        for node in ast.walk(parse(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls.isdisjoint({"open", "print", "input"})


def test_pure_modules_import_only_pure_ones() -> None:
    assert {found.target for module in PURE for found in own_imports(module)} <= PURE


def test_asyncio_is_used_by_the_shells_and_the_async_faces_only() -> None:
    users = {
        module for module in MODULES if any(found.package in ("asyncio", "uvloop") for found in imports_of(module))
    }
    assert "aioenvs.engine.pools.pool" in users
    assert {module for module in users - ASYNCIO if not module.startswith(ASYNC_PARTS)} == set()


def test_processes_are_made_in_one_place() -> None:
    makers = set()
    for module in MODULES:
        packages = {found.package for found in imports_of(module)}
        forks = {
            node.attr
            for node in ast.walk(parse(module))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
        } & {"fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen"}
        if forks or ("multiprocessing" in packages and module not in SENDING):
            makers.add(module)
    # the last one takes only the class of an error from multiprocessing
    assert makers == {*FORKING, "aioenvs.integrations.gymnasium.env"}


def test_gymnasium_is_optional() -> None:
    needing = [
        module
        for module in MODULES
        if not module.startswith(("aioenvs.integrations", "aioenvs.envs", "aioenvs.anything", "aioenvs.serving"))
        and any(found.top and found.package in ("gymnasium", "torchrl") for found in imports_of(module))
    ]
    assert needing == []


@pytest.mark.parametrize(
    "statement",
    [
        "import aioenvs",
        "import aioenvs.errors, aioenvs; aioenvs.errors.ClosedError",
        "import aioenvs.engine.worker.serve",
        "import aioenvs.engine.pools.launcher",
    ],
)
def test_what_a_worker_imports_is_light(statement: str) -> None:
    heavy = ("torch", "tensordict", "gymnasium", "asyncio", "multiprocessing", "rich")
    code = f"{statement}\nimport sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "[]"


# -- public names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", aioenvs.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(aioenvs, name) is getattr(aioenvs, name)
    assert name in dir(aioenvs)


@pytest.mark.parametrize("name", aioenvs._HOMES)
def test_a_lazy_name_is_not_hidden_by_a_module_of_the_same_name(name: str) -> None:
    home = importlib.import_module(aioenvs._HOMES[name])  # which makes the module an attribute of the package
    assert getattr(aioenvs, name) is getattr(home, name)
    assert f"aioenvs.{name}" not in MODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'aioenvs' has no attribute 'ParalelEnv'"):
        aioenvs.ParalelEnv  # noqa: B018
    assert not hasattr(aioenvs, "_nothing")


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from aioenvs import *", names)
    assert set(aioenvs.__all__) <= names.keys()


def test_the_lazy_table_agrees_with_what_type_checkers_read() -> None:
    block = next(node for node in parse("aioenvs").body if is_type_checking(node))
    homes, modules = {}, set()
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if node.module == "aioenvs":
                    modules.add(alias.name)
                else:
                    homes[alias.asname or alias.name] = node.module
    assert homes == aioenvs._HOMES
    assert modules == set(aioenvs._MODULES)
    assert sorted(aioenvs.__all__) == sorted({*homes, *modules, "__version__"})


def test_all_names_only_what_exists() -> None:
    for module in MODULES:
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", [])
        assert (module, [name for name in names if not hasattr(loaded, name)]) == (module, [])
        assert len(names) == len(set(names))
