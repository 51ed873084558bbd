"""Ranks read by processes of this machine, a Dask cluster and a Ray cluster, also while workers die: one answer."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from memprof.advice.analyze_with_advice import ReportBuilder
from memprof.analysis.ranks.reading import RanksReader, read_ranks
from memprof.errors import InputError, UsageError
from memprof.executors import ExecutorChoice, RayExecutor, answers, open_executor
from memprof.executors.cluster import ClusterExecutor
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
    assert ExecutorChoice.named("ray") == ExecutorChoice("ray")
    assert ExecutorChoice.named("ray:auto") == ExecutorChoice("ray", "auto")
    assert ExecutorChoice.named("dask:tcp://10.0.0.1:8786", 5) == ExecutorChoice("dask", "tcp://10.0.0.1:8786", 5)


# ---- clusters that do not answer -------------------------------------------------------------------------------------


class Fixed(Executor):
    """An executor whose tasks all end with one error, or never."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.error is not None:
            future.set_exception(self.error)
        return future


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'memprof'"), "its workers cannot import memprof; install memprof"),
        (OSError("disk\nis full"), "a task failed there with OSError (is full)."),
        (None, "no result for 0.1 s, 3 tasks left; check that the cluster still runs."),
    ],
)
def test_a_clusters_task_is_never_run_here_instead(error: Exception | None, words: str) -> None:
    """It was, all of it and in silence: 64 ranks on a login node."""
    here: list[int] = []
    executor = ClusterExecutor("dask:there", Fixed(error), timeout_s=0.1)
    with pytest.raises(UsageError, match="--executor dask:there: ") as raised:
        list(answers(executor, here.append, [1, 2, 3]))
    assert (words in str(raised.value), here) == (True, [])
    if error is not None:  # somebody's own executor
        with pytest.raises(UsageError, match="--executor Fixed: "):
            list(answers(Fixed(error), here.append, [1, 2, 3]))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["dask:tcp://", "ray:"])
def test_a_web_server_at_the_address_is_named(kind: str, folder: Path, web_server: str) -> None:
    """It was waited for without end."""
    pytest.importorskip("distributed" if kind.startswith("dask") else "ray")
    result = call("report", folder, "--executor", kind + web_server)
    assert (result.exit_code, "a web server answers" in result.stderr) == (2, True)
    assert len(result.stderr.strip().split("\n")) == 1


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_asked(folder: Path) -> None:
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"dask:tcp://127.0.0.1:{silent.getsockname()[1]}"
        result = call("report", folder, "--executor", name, "--executor-timeout", 1)
    assert (result.exit_code, "no scheduler answers there (no answer in 1 s)" in result.stderr) == (2, True)


def test_a_timeout_needs_a_cluster(folder: Path) -> None:
    result = call("report", folder, "--executor-timeout", 5)
    assert (result.exit_code, "--executor-timeout is for a cluster" in result.stderr) == (2, True)


@pytest.mark.slow
def test_a_dask_cluster_that_loses_its_workers_or_its_scheduler(folder: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        choice = ExecutorChoice("dask", cluster.scheduler_address, 2)
        with distributed.Client(cluster) as client:  # a worker to which memprof is unknown
            client.run(exec, "import sys; sys.modules['memprof'] = None")
            result = call("report", folder, "--executor", choice)
            assert (result.exit_code, "its workers cannot import memprof" in result.stderr) == (2, True)
        cluster.scale(0)
        with (
            open_executor(choice, 2) as executor,
            pytest.raises(UsageError, match="no result for 2 s, 2 tasks left; it has no workers"),
        ):
            list(answers(executor, time.sleep, [0.1] * 2))
        with open_executor(choice, 2) as executor:
            threading.Timer(0.5, cluster.close).start()
            with pytest.raises(UsageError, match="the connection to the scheduler was lost"):
                list(answers(executor, time.sleep, [0.1] * 2))
