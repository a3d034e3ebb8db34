"""The Python blocks of README.md and of the pages in docs/ run as a reader would run them: page by page, in order.

The blocks of a page share one namespace and one event loop, and may `await` outside of a function. HTML comments, which
readers do not see, say the rest:

    <!-- run
    code that the blocks after it need, or that closes what those before it have opened
    -->
    <!-- not run: the reason why the next block is only compiled -->
    <!-- pytest: slow -->   (or ray) the tier of the whole page
"""

import ast
import asyncio
import importlib
import inspect
import os
import pydoc
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioenvs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PART = re.compile(
    r"^<!-- run\n(?P<hidden>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>.+?) -->$"
    r"|^(?P<indent> *)```python[^\n]*\n(?P<shown>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
TIER = re.compile(r"^<!-- pytest: (\w+) -->$", re.MULTILINE)
SNIPPET = re.compile(r"^ *-+8<-+ ", re.MULTILINE)

NOT_IN_THE_REFERENCE = ["aioenvs.envs.Described"]  # an implementation detail that has a public name


class Block(NamedTuple):
    """A block of code, the line of the page where it begins, and whether it is run."""

    code: str
    line: int
    runs: bool


def blocks_of(text: str) -> Iterator[Block]:
    """The code of a page; blocks that are included from a script are left to the test of that script."""
    runs = True
    for part in PART.finditer(text):
        if part["reason"] is not None:
            runs = False
            continue
        name = "hidden" if part["hidden"] is not None else "shown"
        indent = part["indent"] or ""
        code = "".join(line.removeprefix(indent) for line in part[name].splitlines(keepends=True))
        if not SNIPPET.search(code):
            yield Block(code, text.count("\n", 0, part.start(name)), runs)
        runs = True


def compiled(page: Path, block: Block) -> types.CodeType:
    """The code of a block, whose tracebacks name the page and its line."""
    code = "\n" * block.line + block.code
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return compile(code, str(page), "exec", flags=flags, dont_inherit=True)


def as_parameter(page: Path) -> Any:
    """A page as a parameter, in its tier."""
    marks = [getattr(pytest.mark, name) for name in TIER.findall(page.read_text())]
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [as_parameter(page) for page in PAGES if any(blocks_of(page.read_text()))])
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "ray" in TIER.findall(page.read_text()):  # which keeps descriptors for as long as its process lives
        code = f"import pathlib, test_docs; test_docs.run_blocks(pathlib.Path({str(page)!r}))"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    else:
        run_blocks(page)


def run_blocks(page: Path) -> None:
    """Run the blocks of a page; compile those that are not to be run."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks_of(page.read_text()):
            code = compiled(page, block)
            if block.runs:
                made = eval(code, namespace)  # a coroutine where there is an `await`
                if made is not None:
                    runner.run(made)
        namespace.clear()


def test_marks_are_understood() -> None:
    text = "<!-- run\na = 1\n-->\n\n<!-- not run: b is not there -->\n\n```python\nb + 1\n```\n\n1. One\n\n"
    text += "    ```python\n    c = [\n        a\n    ]\n    ```\n\n```sh\nls\n```\n\n```python\n--8<-- 'x.py:y'\n```\n"
    found = list(blocks_of(text))
    assert [(block.code, block.runs) for block in found] == [
        ("a = 1\n", True),
        ("b + 1\n", False),
        ("c = [\n    a\n]\n", True),
    ]
    assert [text.splitlines()[block.line] for block in found] == ["a = 1", "b + 1", "    c = ["]


def names_of(module: str) -> list[str]:
    """The public names of a module, with their paths."""
    public = importlib.import_module(module).__all__
    return [f"{module}.{name}" for name in public if name != "__version__"]


def test_every_public_name_has_an_entry_of_the_reference() -> None:
    text = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    entries = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    modules = ["aioenvs", "aioenvs.envs", "aioenvs.errors", "aioenvs.specs", "aioenvs.testing"]
    modules += [f"aioenvs.integrations.{name}" for name in ("gymnasium", "sb3", "torchrl")]
    documented = {id(pydoc.locate(path)) for path in entries}
    assert None not in map(pydoc.locate, entries)
    public = {path: pydoc.locate(path) for module in modules for path in names_of(module)}
    missing = [name for name, found in public.items() if not inspect.ismodule(found) and id(found) not in documented]
    assert missing == NOT_IN_THE_REFERENCE


def test_each_option_is_in_one_group_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?: `([^`]*)`)? \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    parameters = inspect.signature(aioenvs.AsyncParallelEnv).parameters.values()
    expected = {
        parameter.name: "" if parameter.default is parameter.empty else repr(parameter.default).replace("'", '"')
        for parameter in parameters
    }
    assert len(rows) == len(expected)
    assert dict(rows) == expected


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
