"""A process started to simulate starts sooner, and one that is somebody else's stays as it was."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from memprof.cli import main
from memprof.simulate.own_process import NO_MLFLOW
from memprof.simulate.world.fakes import fake_world

_RUN = "from memprof.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
_TOLD = _RUN + "import gc, sys; print('TOLD', 'mlflow' in sys.modules, gc.isenabled())"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a folder with the config of a model of two layers."""
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")
def test_the_command_imports_no_mlflow(small: Path) -> None:
    """TRL imports MLflow wherever it is installed; the command's own process reports to nobody."""
    code = f"import sys; sys.argv = ['memprof', 'simulate', '--model', {str(small)!r}]\n{_TOLD}"
    environment = {name: value for name, value in os.environ.items() if name != NO_MLFLOW}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "TOLD False False"


def test_a_process_that_calls_the_command_stays_as_it_was(small: Path) -> None:
    before = os.environ.get(NO_MLFLOW)
    done = CliRunner().invoke(main, ["simulate", "--model", str(small)])
    assert done.exit_code == 0, done.output
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    assert os.environ.get(NO_MLFLOW) == before


def test_garbage_is_collected_again_after_the_fake_world() -> None:
    with fake_world():
        assert not gc.isenabled()
        assert gc.get_freeze_count()
        with fake_world():  # one in another leaves the outer one as it was
            pass
        assert gc.get_freeze_count()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not gc.get_freeze_count()
