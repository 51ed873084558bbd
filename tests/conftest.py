"""Fixtures every test folder shares."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from memprof.plan import subprocess_runner
from memprof.simulate.fast_start import NO_MLFLOW
from tests.forked import Worker
from tests.workspace import Workspace

if TYPE_CHECKING:
    from memprof.demo import DemoResult


# Started in the background by a shell, tests would hand down that Ctrl-C is ignored, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# TRL imports MLflow wherever it is installed, which the tests' processes need in one place.
os.environ.setdefault(NO_MLFLOW, "TRUE")

# Files of half a minute or more, the longest first: begun last, one of them would leave the other cores idle.
SLOWEST = (
    "test_docs.py",
    "integrations/test_versions.py",
    "simulate/trainer/test_lean.py",
    "simulate/matrix/test_matrix.py",
    "reports/html/test_browser_compare.py",
    "instrument/test_faults.py",
    "simulate/trainer/test_generation.py",
    "integrations/test_ranks.py",
    "recording/guard/test_ways_in.py",
    "simulate/test_real_cpu.py",
    "integrations/test_callback.py",
    "plan/test_subprocess_runner.py",
    "benchmarks/lean/test_flops.py",
    "simulate/sharding/test_fsdp2.py",
    "benchmarks/same_answers/test_same_answers.py",
    "simulate/families/test_families.py",
    "simulate/trainer/test_lean_generation.py",
    "simulate/test_foreign_names.py",
    "simulate/script/test_script.py",
    "simulate/script/test_script_lean.py",
    "reports/html/test_browser_ranks.py",
    "tensorboard/test_tab.py",
    "instrument/test_script.py",
    "instrument/test_attach.py",
    "plan/test_short_steps.py",
    "simulate/fake_cuda/test_failed_simulation.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first, and the others as they are."""
    tests = Path(__file__).parent
    place = {tests / name: index for index, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


# In one process, which trains the demo and runs the examples once.
OF_THE_DEMO = ("tests/test_docs.py", "tests/demo/test_run.py", "tests/examples/test_small_scale.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of ``--dist loadfile``, for which files of the demo are one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return OF_THE_DEMO[0] if file in OF_THE_DEMO else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class _Module(pytest.Module):
    """A test file, skipped where a package that it imports at its top comes with an extra that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            lacking = str(getattr(error.__cause__, "name", "")).partition(".")[0]
            if lacking not in ("torch", "transformers", "trl", "peft") or importlib.util.find_spec(lacking):
                raise
            raise pytest.skip.Exception(f"no {lacking} here", allow_module_level=True) from None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


def _keep_out_of_the_collector() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _imports_are_not_looked_through() -> Iterator[None]:
    """Keep the collector out of what was imported and collected: it took a quarter of the tests' CPU seconds.

    No tensor of a test is among that, so recordings need not look for tensors there, either.
    """
    _keep_out_of_the_collector()
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            patch.setattr("memprof.recording.trace.tensor_trace._is_collector_frozen", lambda: False)
        yield
    gc.unfreeze()


# A collection takes a second where all that was imported meanwhile is looked through; these make it tenths of one.
_FILES_UNTIL_FROZEN = 5
_files_run = count(1)


@pytest.fixture(scope="module", autouse=True)
def _late_imports_are_not_looked_through() -> Iterator[None]:
    yield
    if next(_files_run) % _FILES_UNTIL_FROZEN == 0:
        _keep_out_of_the_collector()


@pytest.fixture(scope="session", autouse=True)
def _simulating_workers_are_forked() -> Iterator[None]:
    """Tests that ask a plan's workers fork them; ``real_workers`` starts them as the package does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_runner, "subprocess", SimpleNamespace(Popen=Worker, PIPE=subprocess.PIPE))
        yield


@pytest.fixture
def real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_runner, "subprocess", subprocess)


@pytest.fixture
def thawed() -> Iterator[None]:
    """For tests that look at the collector: what the session froze is not, until they end."""
    gc.unfreeze()
    yield
    _keep_out_of_the_collector()


@pytest.fixture(scope="module")
def only_new_tensors() -> Iterator[None]:
    """For tests that compare a recording to the byte: tensors that other modules' tests hold are not in it.

    They are known by their storages, which the fixture holds: the Python object of a gradient is a new one whenever it
    is read, and what is freed in the middle of a test would make its recordings differ.
    """
    pytest.importorskip("torch")
    import memprof.recording.trace.tensor_trace as trace
    from memprof.recording.storages import storage_key

    gc.collect()
    every = trace._visible_storages
    held = {storage_key(storage): storage for storage in every()}

    def visible() -> list[Any]:
        return [storage for storage in every() if storage_key(storage) not in held]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "_visible_storages", visible)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real snapshots beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[1].parent / "shared"
    if not (folder / "snapshots").is_dir():
        pytest.skip("the folder of real snapshots (../shared) is not here")
    return folder


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """The demo with its tiny model: two recorded GRPO runs and all the files they leave. Not to be changed."""
    pytest.importorskip("trl")
    import torch

    from memprof.demo import run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several threads
    try:
        return run(tmp_path_factory.mktemp("demo"), quick=True)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def workspace(quick_demo: DemoResult, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Where the commands of the documentation run."""
    return Workspace(tmp_path_factory.mktemp("docs"), quick_demo.out)
