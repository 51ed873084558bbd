"""Simulate settings in separate processes, or take the result from the cache.

The calling program must not be affected. Workers are not forked and do not import its main module. They see no GPU,
and a launcher's variables are removed, so that they do not join its run as a rank. This module imports nothing of the
simulator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from threading import Lock

import msgspec

from memprof.config.catalogue import find_config
from memprof.config.gpus import Gpu
from memprof.config.settings import Settings
from memprof.errors import InputError, MemprofError, UsageError
from memprof.executors import ExecutorChoice, as_cluster, cores, free_memory, open_executor
from memprof.plan import cache
from memprof.plan.simulations import SimulatedRow, SimulationRequest, SimulationResult, SizeChoices

_ONE = 1_200_000_000  # bytes a worker takes while it simulates, as measured and with some reserve
_MOST_WORKERS = 4  # more only share a machine's memory bandwidth
_WORKER = "memprof.simulate.worker"
_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "MEMPROF",
    "MEMPROF_EMULATE_RECORD",
)  # fmt: skip
_LAUNCHERS_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PARALLELISM_CONFIG_", "DEEPSPEED_")

# The idle processes that simulate for a worker of an executor; they end with it, when their standard input does.
_BESIDE: SimpleQueue[_Worker] = SimpleQueue()


class Runner:
    """Simulate settings in parallel and keep the results.

    Args:
        gpu: as ``--gpu``, or a card with its own size; with None, rows do not tell whether they fit.
        workers: number of processes; None takes one per core, as far as memory allows.
        progress: called after every simulation or cached result with (how many are done, how many were requested).
        use_cache: whether to keep results on disk.
        executor: simulates elsewhere, in a process of memprof's own beside each worker; None for processes here.

    ``workers`` is how many simulations run side by side; ``executed`` counts those that were not in the cache.
    """

    def __init__(
        self,
        gpu: str | Gpu | None,
        workers: int | None,
        progress: Callable[[int, int], None] | None,
        use_cache: bool = True,
        executor: Executor | None = None,
    ) -> None:
        self._executor = executor
        self._cluster = as_cluster(executor)
        self.gpu = gpu
        self.workers = workers or max(1, min(cores(), _MOST_WORKERS, free_memory() // _ONE))
        self._progress = progress
        self._use_cache = use_cache
        self._threads: ThreadPoolExecutor | None = None
        self._all: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._asked = self._done = self._expected = 0
        self.executed = 0

    def run(
        self,
        wanted: list[Settings],
        *,
        sizes: list[SizeChoices] | None = None,
        done: Callable[[int, SimulatedRow], None] | None = None,
    ) -> list[SimulatedRow]:
        """Return rows in the order of ``wanted``.

        Args:
            wanted: the settings to simulate.
            sizes: of each, what to resize its run to for the row's ``largest`` (:func:`memprof.plan.sizes.choices`).
            done: called with the index and the row of each simulation when it is done.

        Raises:
            InputError, UsageError: some settings cannot be simulated.
        """
        asked: list[SizeChoices | None] = [None] * len(wanted) if sizes is None else [*sizes]
        rows = self._rows([self._question(*pair) for pair in zip(wanted, asked, strict=True)], done)
        return [rows[i] for i in range(len(wanted))]

    def run_each(self, wanted: list[Settings], refused: dict[int, str]) -> list[SimulatedRow | None]:
        """Return rows in the order of ``wanted``, ``None`` for settings that cannot be simulated.

        ``refused`` receives, by index, the reason why.
        """
        rows = self._rows([self._question(settings, None) for settings in wanted], refused=refused)
        return [rows.get(i) for i in range(len(wanted))]

    def _rows(
        self,
        questions: list[SimulationRequest],
        done: Callable[[int, SimulatedRow], None] | None = None,
        refused: dict[int, str] | None = None,
    ) -> dict[int, SimulatedRow]:
        rows: dict[int, SimulatedRow] = {}
        waiting: dict[Future[SimulatedRow], int] = {}
        self._asked += len(questions)
        for index, question in enumerate(questions):
            known = cache.load(self._key(question)) if self._use_cache else None
            if known is not None:
                rows[index] = known
                self._step()
                if done is not None:
                    done(index, known)
            else:
                waiting[self._submit(question)] = index
        for future in as_completed(waiting) if self._cluster is None else self._cluster.completed(waiting):
            index = waiting[future]
            row = None
            try:
                row = rows[index] = self._row(future, questions[index])
            except MemprofError as error:
                if refused is None:
                    raise
                refused[index] = str(error)
            self.executed += 1
            if self._use_cache and row is not None:
                self._keep(questions[index], row)
            self._step()
            if done is not None and row is not None:
                done(index, row)
        return rows

    def _row(self, future: Future[SimulatedRow], question: SimulationRequest) -> SimulatedRow:
        """Return a simulation's row; what a lost process of this machine did not answer is simulated here."""
        if self._cluster is not None:
            return self._cluster.result(future)
        try:
            return future.result()
        except MemprofError:
            raise
        except (Exception, CancelledError):
            if self._executor is None:
                raise
            return self._here(question).result()

    def _key(self, question: SimulationRequest) -> str:
        config = find_config(question.settings["model"])
        if (judge := question.settings["reward_model"]) is not None:
            config = {**config, "reward_model": find_config(judge)}
        return cache.key_of(question.settings, config, question.gpu, question.sizes)

    def _keep(self, question: SimulationRequest, row: SimulatedRow) -> None:
        """Keep a row; where its run was resized, also the plain row, for searches that ask for that alone."""
        cache.store(self._key(question), row)
        if question.sizes is not None:
            plain = msgspec.structs.replace(question, sizes=None)
            cache.store(self._key(plain), msgspec.structs.replace(row, largest=None))

    def expect(self, simulations: int) -> None:
        """Tell how many simulations there will be at most, so that the progress knows how far it is."""
        self._expected = simulations

    def close(self) -> None:
        """End the workers, even in the middle of a simulation."""
        if self._threads is None:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.end()
        self._threads.shutdown(wait=True)

    def _submit(self, question: SimulationRequest) -> Future[SimulatedRow]:
        if self._cluster is not None:
            return self._cluster.submit(simulated_there, question)
        if self._executor is not None:
            with suppress(RuntimeError):  # a broken executor takes nothing more
                return self._executor.submit(simulated_there, question)
        return self._here(question)

    def _here(self, question: SimulationRequest) -> Future[SimulatedRow]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="memprof-simulations")
            self._all = [_Worker() for _ in range(self.workers)]
            for worker in self._all:
                self._idle.put(worker)
        return self._threads.submit(self._ask, question)

    def _ask(self, question: SimulationRequest) -> SimulatedRow:
        worker = self._idle.get()
        try:
            return worker.ask(question)
        finally:
            self._idle.put(worker)

    def _question(self, settings: Settings, sizes: SizeChoices | None) -> SimulationRequest:
        return SimulationRequest(settings=settings.to_dict(), gpu=self.gpu, sizes=sizes)

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, max(self._asked, self._expected))


class _Worker:
    """Ask a process that simulates, started with the first question: one JSON line in, one out."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._starting = Lock()

    def ask(self, question: SimulationRequest) -> SimulatedRow:
        """Return the row of one simulation.

        Raises:
            InputError, UsageError: the settings cannot be simulated, or the process ended by itself.
        """
        with self._starting:
            if self._ended:
                raise InputError("the simulations were ended before this one began.")
            process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(question).decode() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._process = None
            raise InputError(f"the process that simulates ended by itself (exit code {process.wait()}).")
        answer = msgspec.json.decode(line, type=SimulationResult)
        if answer.row is None:
            raise (UsageError if answer.exit_code == UsageError.exit_code else InputError)(answer.error or "no answer")
        return answer.row

    def end(self) -> None:
        """Kill the process, which is safe because it writes no files."""
        with self._starting:
            self._ended, process = True, self._process
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()


@contextmanager
def runner(
    gpu: str | Gpu | None,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    use_cache: bool = True,
    executor: Executor | ExecutorChoice | str | None = None,
) -> Iterator[Runner]:
    """Open a runner whose workers end with the block.

    Args:
        gpu, workers, progress, use_cache: as of :class:`Runner`.
        executor: an executor, or which one to open (:class:`memprof.executors.ExecutorChoice`, or its name); None and
            ``local`` are processes of this machine.

    Raises:
        UsageError: there is no such executor.
    """
    choice = ExecutorChoice.named(executor) if isinstance(executor, str) else executor
    if isinstance(choice, ExecutorChoice) and choice.kind == "local":
        choice = None
    far = open_executor(choice, 1) if isinstance(choice, ExecutorChoice) else nullcontext(choice)
    with far as opened:
        made = Runner(gpu, workers, progress, use_cache, opened)
        try:
            yield made
        finally:
            made.close()


def simulated_there(question: SimulationRequest) -> SimulatedRow:
    """Simulate in a process beside this one, which stays for the next question: a cluster's worker calls this.

    Raises:
        InputError, UsageError: as of :meth:`Runner.run`.
    """
    try:
        worker = _BESIDE.get_nowait()
    except Empty:
        worker = _Worker()
    try:
        return worker.ask(question)
    finally:
        _BESIDE.put(worker)


def _start() -> subprocess.Popen[str]:
    kept = {n: v for n, v in os.environ.items() if n not in _LAUNCHERS and not n.startswith(_LAUNCHERS_PREFIXES)}
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "MEMPROF": "0"},
    )
