"""What the modules for other libraries say where these are not installed."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    __import__(sys.argv[2])
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("gymnasium", "gymnasium", "gym"),
        ("stable_baselines3", "sb3", "sb3"),
        ("torchrl", "torchrl", "torchrl"),
        ("tensordict", "torchrl", "torchrl"),
    ],
)
@pytest.mark.slow
def test_what_installs_a_missing_library_is_said(package: str, module: str, extra: str) -> None:
    arguments = [sys.executable, "-c", WITHOUT, package, f"aioenvs.integrations.{module}"]
    told = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=50).stdout
    assert f"needs {package}" in told
    assert told.strip().endswith(f"pip install 'aioenvs[{extra}]'")
