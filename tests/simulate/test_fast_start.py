"""A process started to simulate starts sooner, and one that is somebody else's stays as it was."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from memprof.cli import main
from memprof.simulate.fake_cuda.fakes import fake_world
from memprof.simulate.fast_start import NO_MLFLOW

_RUN = "from memprof.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
_TOLD = _RUN + "import gc, sys; print('TOLD', 'mlflow' in sys.modules, gc.isenabled())"


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")
def test_the_command_imports_no_mlflow(tiny: str) -> None:
    """TRL imports MLflow wherever it is installed; the command's own process reports to nobody."""
    code = f"import sys; sys.argv = ['memprof', 'simulate', '--model', {tiny!r}]\n{_TOLD}"
    environment = {name: value for name, value in os.environ.items() if name != NO_MLFLOW}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "TOLD False False"


@pytest.mark.usefixtures("thawed")
def test_a_process_that_calls_the_command_stays_as_it_was(tiny: str) -> None:
    before = os.environ.get(NO_MLFLOW)
    done = CliRunner().invoke(main, ["simulate", "--model", tiny])
    assert done.exit_code == 0, done.output
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    assert os.environ.get(NO_MLFLOW) == before


@pytest.mark.usefixtures("thawed")
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
