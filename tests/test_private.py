"""No object reads the private attributes of one of another kind, in the package; those of libraries are listed here."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import aioenvs

PACKAGE = Path(aioenvs.__file__).parent
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# What libraries have under a private name, and there is no other way to; names that only look private are here, too.
# A name that means something else in other modules stands behind the module for which it is listed.
LIBRARIES = {
    "_replace": "a public method of named tuples",
    "_make": "a public method of named tuples",
    "_exit": "a public function of os",
    "_get_running_loop": "asyncio: the loop or None; the public function raises, and steps ask often",
    "_set_running_loop": "asyncio: a coroutine that is run without a task finds its loop by it",
    "_asyncio_future_blocking": "asyncio: by which whoever waits for a future says that it was handed on",
    "_log_destroy_pending": "asyncio: a task that is given up on purpose is not to be complained of",
    "_clear": "atexit: what the parent registered is not for a forked child",
    "_run_exitfuncs": "atexit: a forked child leaves by os._exit, which does not run them",
    "_local": "asyncio: the loop that a policy keeps is the parent's, not a forked child's",
    "_args_from_interpreter_flags": "subprocess: a worker's interpreter has the flags of this one",
    "_resource_tracker": "multiprocessing: a worker shares its parent's",
    "_fd": "multiprocessing: the pipe to the resource tracker, which a worker inherits",
    "_extra_reducers": "multiprocessing: reducers that others registered for what pickle cannot",
    "_new_unsafe": "tensordict: the constructor without checks, for entries that are known to fit",
    "_maybe_names": "tensordict: the names of dims, None without any; the public one makes a list",
    "_has_names": "tensordict: whether dims have names; the public one makes a list",
    "_td_dim_name": "tensordict: the name of a lazy stack's own dim, which cannot be set otherwise",
    "_set_str": "tensordict: sets an entry that is known to fit",
    "_tensordict": "tensordict: the TensorDict in a tensorclass",
    "_from_tensordict": "tensordict: a tensorclass around a TensorDict, without its constructor",
    "_foreach_copy_": "torch: many copies in one call",
    "_version": "torch: how often a tensor was written to",
    "_cdata": "torch: which storage two tensors share",
    "_mp_values": "TorchRL: numbers that the envs of an EnvCreator share",
    "_td_dim_names": "TorchRL: the names of a spec's dims, None without any",
    "integrations/torchrl/specs.py:_specs": "TorchRL: the entries of a Composite, members of a stack",
    "integrations/torchrl/worker.py:_env": "TorchRL: the Gymnasium env in a GymEnv",
    "_convert_actions_to_numpy": "TorchRL: how a GymEnv reads actions",
    "_is_batched": "TorchRL: whether a GymEnv holds a vector env",
    "_simple_done": "TorchRL: whether `done` at the root says all",
    "_post_step_mdp_hooks": "TorchRL: what transforms do between a step and the next root",
    "_check_batched_worker_compat": "TorchRL: the check of a transform in a worker",
    "_input_td_has_state": "TorchRL: whether a reset takes the state from its input",
    "errors.py:_message": "of a class that is made when it is needed, by the functions that read this",
    "errors.py:_likeness": "of the same class",
}

# Reads that are still to go, by folder: a number here is never raised, and is lowered with the reads.
ALLOWED = {"collectors": 8, "faces": 16, "integrations/torchrl": 9}


class Read(NamedTuple):
    """One private attribute of something else than `self`, `cls` and `super()`."""

    module: str
    line: int
    text: str
    name: str


def reads() -> Iterator[Read]:
    """All but those of names that a class of the module has, by itself or from one of the package that it extends."""
    for module, tree in TREES.items():
        known = own_names(module) | {name.removeprefix(f"{module}:") for name in LIBRARIES}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
                holder = ast.unparse(node.value)
                if holder not in ("self", "cls") and not holder.startswith("super("):
                    yield Read(module, node.lineno, ast.unparse(node), node.attr)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(module: str) -> set[str]:
    """The private names of a module's own functions and classes, and of the package's classes that those extend."""
    tree = TREES[module]
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= names_of(module, node.name)
    return names


def names_of(module: str, cls: str) -> set[str]:
    """The names that a class of the package defines, or sets in itself, and those of its bases; of others none."""
    found = next((n for n in ast.walk(TREES[module]) if isinstance(n, ast.ClassDef) and n.name == cls), None)
    if found is None:
        return set()
    names: set[str] = set()
    for node in ast.walk(found):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    for base in found.bases:
        names |= names_of(*_home(module, ast.unparse(base).partition("[")[0]))
    return names


def _home(module: str, name: str) -> tuple[str, str]:
    """The module of the package in which a name is defined, as far as one import tells."""
    head, _, rest = name.partition(".")
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == head:
                    for origin in (f"{node.module}.{alias.name}", str(node.module)):
                        path = origin.removeprefix("aioenvs.").replace(".", "/")
                        for candidate in (f"{path}.py", f"{path}/__init__.py"):
                            if candidate in TREES:
                                return (candidate, rest or alias.name)
                    return (module, "")  # of a library
    return (module, name)


def test_nobody_reads_the_private_attributes_of_another_kind_of_object() -> None:
    found = defaultdict(list)
    for read in reads():
        folder = next((name for name in ALLOWED if read.module.startswith(name)), read.module)
        found[folder].append(read)
    above = {folder: each for folder, each in found.items() if len(each) > ALLOWED.get(folder, 0)}
    assert above == {}


def test_each_name_of_a_library_is_still_read() -> None:
    used = Counter(node.attr for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    assert [name for name in LIBRARIES if not used[name.rpartition(":")[2]]] == []
