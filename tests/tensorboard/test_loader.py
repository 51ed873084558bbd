"""What the plugin costs TensorBoard's start, and that it can never stop it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADER = "memprof.integrations.board.loader"

WITHOUT = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tensorboard", "numpy", "werkzeug", "plotly", "torch", "rich", "click"}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Nothing())
"""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_imports_with_every_dependency_missing() -> None:
    said = python(f"{WITHOUT}\nfrom {LOADER} import MemoryTabLoader\nprint(MemoryTabLoader().load(None))")
    assert said.strip() == "None"


def test_it_is_what_tensorboard_finds() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.plugins.base_plugin import TBLoader

    (ours,) = {e.value for e in entry_points(group="tensorboard_plugins") if e.name == "memprof"}
    assert ours == f"{LOADER}:MemoryTabLoader"
    from memprof.integrations.board.loader import MemoryTabLoader

    assert issubclass(MemoryTabLoader, TBLoader)


def test_a_plugin_that_cannot_be_made_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    from memprof.integrations.board.loader import MemoryTabLoader

    assert MemoryTabLoader().load(SimpleNamespace(flags=None)) is None  # an old or new TensorBoard's context
    assert "no Memory tab" in capsys.readouterr().err


LOADED = f"""
import json, sys
from tensorboard import default, program
from tensorboard.plugins import base_plugin
before = set(sys.modules)
from {LOADER} import MemoryTabLoader
from types import SimpleNamespace
plugin = MemoryTabLoader().load(SimpleNamespace(logdir="/nonexistent", flags=None))
plugin.frontend_metadata(); plugin.get_plugin_apps(); plugin.is_active()
print(json.dumps(sorted({{m.split(".")[0] for m in set(sys.modules) - before}})))
"""


def test_it_brings_nothing_heavy() -> None:
    """How long it takes is measured by ``python -m benchmarks.reading startup``."""
    pytest.importorskip("tensorboard")
    loaded = set(json.loads(python(LOADED)))
    assert loaded.isdisjoint({"torch", "plotly", "pandas", "rich", "transformers", "click"})
