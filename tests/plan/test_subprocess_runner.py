"""Simulations in processes of their own: real workers, that survive bad settings and end when they are told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.config.gpus import Gpu
from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from memprof.plan.simulations import SimulationRequest
from memprof.plan.subprocess_runner import Runner, runner
from tests.plan.rows import simulated_row
from tests.simulate.conftest import settings_for, tiny  # noqa: F401

pytestmark = pytest.mark.usefixtures("real_workers")


def _key(machine: Runner, settings: Settings) -> str:
    return machine._key(machine._question(settings, None))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_rows_come_in_order_and_are_remembered(settings_for: Callable[..., Settings]) -> None:  # noqa: F811
    """A card reaches the workers with its own size, and settings that cannot be simulated end none of them.

    cuBLAS's workspace is 32 MiB on compute capability 9 and 8,519,680 B before; the size alone does not say.
    """
    from memprof.simulate.evaluate import run_row

    older, newer = (Gpu("of a size", 24 * 10**9, (major, 0)) for major in (8, 9))
    told: list[tuple[int, int]] = []
    wanted = [settings_for(completion_length=n) for n in (40, 8)]
    wrong = settings_for(lora_r=4, lora_target_modules=("no_such_layer",))
    with runner(older, workers=2, progress=lambda done, asked: told.append((done, asked))) as machine:
        rows = machine.run(wanted)
        assert told == [(1, 2), (2, 2)]
        with pytest.raises((InputError, UsageError), match="no_such_layer"):
            machine.run([wrong])
        refused: dict[int, str] = {}
        some = machine.run_each([wrong, settings_for(completion_length=9)], refused)
    assert rows[0].peak_bytes > rows[1].peak_bytes
    here = run_row(SimulationRequest(settings=wanted[1].to_dict(), gpu=older))
    assert rows[1] == here, "a worker's row is the one this process gets"
    other = run_row(SimulationRequest(settings=wanted[1].to_dict(), gpu=newer))
    assert other.peak_bytes - rows[1].peak_bytes in {n * (32 * 2**20 - 8_519_680) for n in (1, 2)}
    assert some[0] is None
    assert "no_such_layer" in refused[0]
    assert some[1] is not None
    with runner(older) as again:
        assert again.run(wanted) == rows
        assert again.executed == 0
    assert _key(Runner(newer, 1, None), wanted[0]) != _key(again, wanted[0]), "another card, another result"


def test_a_worker_that_dies_is_a_sentence(settings_for: Callable[..., Settings], monkeypatch: Any) -> None:  # noqa: F811
    from memprof.plan import subprocess_runner

    monkeypatch.setattr(subprocess_runner, "_WORKER", "memprof.no_such_worker")
    with runner(None, workers=1) as machine, pytest.raises(InputError, match=r"ended by itself \(exit code 1\)"):
        machine.run([settings_for()])


def test_no_worker_starts_after_the_end(settings_for: Callable[..., Settings]) -> None:  # noqa: F811
    machine = Runner(None, 1, None)
    machine._submit(machine._question(settings_for(), None)).cancel()
    machine.close()
    with pytest.raises(InputError, match="ended before"):
        machine._all[0].ask(SimulationRequest(settings={}, gpu=None))


@pytest.mark.parametrize("text", ["{}", '{"fits": true}', "[1]", "{", "\xff"])
def test_a_broken_file_of_the_cache_is_simulated_again(
    settings_for: Callable[..., Settings],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    found = simulated_row(peak_bytes=7, categories={"weights": 7})
    monkeypatch.setattr(Runner, "_ask", lambda *_: found)
    with runner("24GB", workers=1) as machine:
        machine.run([settings_for()])
        (file,) = (tmp_path / "cache").iterdir()
        file.write_text(text, encoding="latin-1")
        assert machine.run([settings_for()]) == [found]
        assert machine.executed == 2
        assert machine.run([settings_for()]) == [found]
        assert machine.executed == 2


def test_rows_are_kept_by_their_reward_models_config_too(
    settings_for: Callable[..., Settings],  # noqa: F811
    tmp_path: Path,
) -> None:
    judge = tmp_path / "judge.json"
    keys = []
    for layers in (1, 2):
        judge.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
        keys.append(_key(Runner("24GB", 1, None), settings_for(reward_model=str(judge))))
    assert keys[0] != keys[1]


def test_a_worker_whose_asker_has_ended_ends_without_a_word() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "memprof.simulate.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdout is not None
    worker.stdout.close()
    _, errors = worker.communicate('{"settings": {}, "gpu": null}\n', timeout=120)
    assert "Traceback" not in errors
    assert worker.returncode == 0


_INTERRUPTED = """
import sys
from memprof.config.settings import Settings
from memprof.plan.simulations import SimulationRequest
from memprof.plan.subprocess_runner import runner
with runner(None, workers=2, progress=None) as machine:
    print("started", flush=True)
    machine.run([Settings(model=sys.argv[1], num_generations=4, per_device_train_batch_size=4, prompt_length=8,
                          completion_length=n) for n in range(9, 40)])
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a signal to a process group")
def test_ctrl_c_leaves_no_worker(tiny: str) -> None:  # noqa: F811
    asking = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, tiny],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert asking.stdout is not None
    asking.stdout.readline()
    time.sleep(1)
    os.killpg(asking.pid, signal.SIGINT)
    _, errors = asking.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(asking.pid, 0)


@pytest.mark.heavy
def test_an_executor_simulates_elsewhere_and_what_it_loses_is_simulated_here(
    settings_for: Callable[..., Settings],  # noqa: F811
) -> None:
    """Real processes as of a cluster: the same rows, also where a worker is killed and the pool is broken by it."""
    from memprof.executors import open_executor

    wanted = [settings_for(completion_length=n) for n in (40, 8)]
    with runner("24GB", workers=1, use_cache=False) as machine:
        rows = machine.run(wanted)
    with (
        open_executor("local", 2) as executor,
        runner("24GB", workers=1, use_cache=False, executor=executor) as machine,
    ):
        assert executor is not None
        assert machine.run(wanted) == rows
        assert machine._threads is None  # nothing was simulated here
        executor.submit(os._exit, 1)
        assert machine.run(wanted) == rows
        assert machine._threads is not None
