"""The tutorials run, and draw their pictures; the pages show the parts of the scripts, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))


def run(name: str, *arguments: str) -> str:
    """Run the script of a tutorial to its end, which is a good one; return what it printed."""
    command = [sys.executable, str(TUTORIALS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_each_step_to_an_async_trainer_is_measured_and_drawn(tmp_path: Path) -> None:
    output = run("async_trainer.py", "--answer", "0.002", "--seconds", "0.5", "--train", "2", "--output", str(tmp_path))
    speeds = [float(found.replace(",", "")) for found in re.findall(r"([\d,]+) frames/s", output)]
    assert len(speeds) == 10
    assert speeds[3] > 2 * speeds[0]  # sixteen envs that wait at the same time
    assert len(re.findall(r"mean return after 2 s: \d+$", output, re.MULTILINE)) == 3
    assert drawn(tmp_path) == ["async-trainer-curves.png", "async-trainer-gains.png"]


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_sessions_with_a_model_are_given_up_and_restarted(tmp_path: Path) -> None:
    options = ("--sessions", "60", "--answer", "0.1", "--seconds", "4", "--output", str(tmp_path))
    output = run("language_model.py", *options)
    found = re.search(r"all together: (\d+) answers/s; whoever is ready: (\d+);", output)
    assert found is not None, output
    assert int(found[2]) > int(found[1])
    assert "all 60 had new episodes" in output
    assert "15 sessions were built anew" in output
    assert drawn(tmp_path) == ["language-model-restart.png", "language-model-speeds.png"]


def drawn(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.read_bytes().startswith(b"\x89PNG"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_parts_and_pictures_of_a_page_are_there(page: Path) -> None:
    text = page.read_text()
    parts = re.findall(r'--8<-- "tutorials/([\w.]+):(\w+)"', text)
    script = (TUTORIALS / parts[0][0]).read_text()
    assert {name for name, _ in parts} == {parts[0][0]}
    assert [part for _, part in parts if f"--8<-- [start:{part}]" not in script] == []
    assert sorted(part for _, part in parts) == sorted(re.findall(r"\[start:(\w+)\]", script))
    assert all((TUTORIALS / picture).exists() for picture in re.findall(r"\]\((pictures/.+?)\)", text))
