"""Ranks read by processes of this machine, a Dask cluster and a Ray cluster, also while workers die: one answer."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from memprof.advice.analyze_with_advice import ReportBuilder
from memprof.analysis.ranks.reading import RanksReader, read_ranks
from memprof.errors import InputError
from memprof.executors import RayExecutor, answers, check_executor, open_executor
from tests.cli.test_cli import call
from tests.cli.test_report_ranks import record

RANKS = 6


def killed_once(path: Path) -> dict[str, Any]:
    """Make a report; the worker that meets the marker first dies of it, as one that the system kills."""
    marker = path.with_name("kill-me")
    if path.name == "mem_rank_2.pickle" and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return ReportBuilder()(path)


def refuses(number: int) -> int:
    if number == 2:
        raise InputError("two is refused")
    return number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(RANKS):
        record(tmp_path / f"mem_rank_{rank}.pickle", 2 * rank)
    return tmp_path


def read(folder: Path, executor: Executor | None, make: Any) -> dict[str, Any]:
    return read_ranks([folder], RanksReader(make), executor=executor).report


def same_after_a_lost_worker(folder: Path, executor: Executor) -> None:
    plain = read(folder, None, ReportBuilder())
    assert read(folder, executor, ReportBuilder()) == plain
    (folder / "kill-me").touch()
    assert read(folder, executor, killed_once) == plain
    assert not (folder / "kill-me").exists()  # so a worker was killed


def test_processes_of_this_machine(folder: Path) -> None:
    with open_executor("local", RANKS) as executor:
        assert executor is not None
        same_after_a_lost_worker(folder, executor)


@pytest.mark.slow
def test_dask(folder: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        open_executor(f"dask:{cluster.scheduler_address}", RANKS) as executor,
    ):
        assert executor is not None
        same_after_a_lost_worker(folder, executor)
        result = call("report", folder, "--executor", f"dask:{cluster.scheduler_address}")
        assert (result.exit_code, "Rank 5 peaks highest" in result.stdout) == (0, True)


@pytest.mark.heavy
def test_ray(folder: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        with RayExecutor() as executor:
            same_after_a_lost_worker(folder, executor)
        assert ray.is_initialized()  # who began it ends it
    finally:
        ray.shutdown()


def test_errors_of_the_function_are_raised_and_others_asked_again_here() -> None:
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(InputError, match="two is refused"):
            list(answers(executor, refuses, [1, 2, 3]))
        executor.shutdown()
        told: list[tuple[int, int]] = []
        assert list(answers(executor, refuses, [1, 3], lambda *n: told.append(n))) == [1, 3]  # it takes nothing more
        assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("name", ["dask", "local:4", "slurm", "dask:tcp://127.0.0.1:1"])
def test_mistakes_are_one_sentence(name: str, folder: Path) -> None:
    result = call("report", folder, "--executor", name)
    assert (result.exit_code, f"--executor {name.partition(':')[0]}" in result.stderr.replace("'", "")) == (2, True)
    assert len(result.stderr.strip().split("\n")) == 1


def test_names() -> None:
    assert check_executor("ray") == ("ray", "")
    assert check_executor("ray:auto") == ("ray", "auto")
    assert check_executor("dask:tcp://10.0.0.1:8786") == ("dask", "tcp://10.0.0.1:8786")
