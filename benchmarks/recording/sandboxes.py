"""Train with rewards that run code in child processes, as frameworks build such sandboxes, with and without memprof.

    python -m benchmarks.recording sandboxes [--rounds 50] [--load 2] [--kind KIND ...] [--json FILE]

Every reward scores the completions in a child, and has one more child run a program that never ends, which its time
limit ends. A training in a process of its own says what its parameters and rewards are, and how those children ended.
With memprof, which records every step, all of that must be the same, and the process must end as it does without.
Each process imports memprof anew, so nobody may edit it meanwhile: the benchmark ends if somebody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import click

from benchmarks.measure import write_result
from benchmarks.tabling import ROOT

# Seconds: after the first a program without an end is ended; no other program needs the second.
SHORT, LONG = 0.2, 60.0
# Seconds of a training that hangs.
HUNG = 240
# A program without an end: one call into C, during which Python runs no handler.
ENDLESS = "sum(range(10**13))"


def scored(text: str) -> float:
    """Return a completion's score: what its code computes."""
    found: dict[str, Any] = {}
    exec("value = sum(map(ord, text)) % 97 / 97", {"text": text}, found)
    return float(found["value"])


def endless(text: str = "") -> float:
    return float(eval(ENDLESS))


class Sandbox:
    """A reward function; ``ends`` is how children that ran a program without an end have ended, one a call."""

    __name__ = "sandbox"

    def __init__(self, score: Callable[[list[str]], tuple[list[float], object]]) -> None:
        self._score = score
        self.ends: list[object] = []
        self.rewards: list[float] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        rewards, end = self._score(completions)
        self.rewards += rewards
        self.ends.append(end)
        return rewards


# -- children of multiprocessing -----------------------------------------------------------------------------------


def _answer(score: Callable[[str], float], text: str, queue: Any) -> None:
    queue.put(score(text))


def process(texts: list[str]) -> tuple[list[float], object]:
    """A process for each program, ``join`` with a limit, ``terminate``."""
    context = multiprocessing.get_context("fork")
    rewards = []
    for text in texts:
        queue = context.SimpleQueue()
        child = context.Process(target=_answer, args=(scored, text, queue))
        child.start()
        rewards.append(queue.get())
        child.join(LONG)
    child = context.Process(target=endless)
    child.start()
    child.join(SHORT)
    child.terminate()
    child.join(LONG)
    return rewards, child.exitcode


def _limited(score: Callable[[str], float], text: str, found: Any, seconds: float) -> None:
    """As verl's ``prime_code`` runs a program: with limits, an alarm, and without what could harm the machine."""

    def too_late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(LONG), int(LONG)))
    os.kill = os.fork = subprocess.Popen = None  # type: ignore[assignment, misc]
    try:
        found.append(score(text))
    except TimeoutError:
        found.append(-1.0)


def _waiting(text: str) -> float:
    while True:
        time.sleep(0.01)


def limits(texts: list[str]) -> tuple[list[float], object]:
    """A manager's list for the answers, ``kill`` after the limit (verl)."""
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        ends: list[object] = []
        rewards = []
        tasks = [*((scored, text, LONG) for text in texts), (_waiting, "", SHORT), (endless, "", LONG)]
        for score, text, seconds in tasks:
            found = manager.list()
            child = context.Process(target=_limited, args=(score, text, found, seconds))
            child.start()
            child.join(SHORT if score is endless else LONG)
            if child.is_alive():
                child.kill()
                child.join()
            rewards += list(found)
            ends.append(child.exitcode)
        return rewards[: len(texts)], [rewards[len(texts) :], ends]


def pool(texts: list[str]) -> tuple[list[float], object]:
    """``multiprocessing.Pool``: a map, a call that is late, and ``terminate`` at the end."""
    with multiprocessing.get_context("fork").Pool(2) as workers:
        rewards = workers.map_async(scored, texts).get(LONG)
        try:
            return rewards, workers.apply_async(endless).get(SHORT)
        except multiprocessing.TimeoutError:
            return rewards, "late"


def executor(method: str) -> Callable[[list[str]], tuple[list[float], object]]:
    """Return a ``ProcessPoolExecutor``'s: a late worker is terminated."""

    def score(texts: list[str]) -> tuple[list[float], object]:
        context: Any = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context) as workers:
            rewards = list(workers.map(scored, texts, timeout=LONG))
            late: Future[float] = workers.submit(endless)
            try:
                return rewards, late.result(SHORT)
            except TimeoutError:
                children = list((workers._processes or {}).values())
                for child in children:
                    child.terminate()
        return rewards, sorted({child.exitcode for child in children if child.exitcode == -signal.SIGTERM})

    return score


# -- programs ------------------------------------------------------------------------------------------------------


def _program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"print(sum(map(ord, {text!r})) % 97 / 97)"]


_NEVER = [sys.executable, "-S", "-c", ENDLESS]


def _run(text: str) -> float:
    done = subprocess.run(_program(text), capture_output=True, text=True, timeout=LONG, check=True)
    return float(done.stdout)


def program(texts: list[str]) -> tuple[list[float], object]:
    """``subprocess.run`` with a time limit."""
    rewards = [_run(text) for text in texts]
    try:
        return rewards, subprocess.run(_NEVER, timeout=SHORT).returncode
    except subprocess.TimeoutExpired:
        return rewards, "late"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(LONG), int(LONG)))


def session(texts: list[str]) -> tuple[list[float], object]:
    """Programs in threads, one in a session of its own with limits set before ``exec``, ended by its group."""
    with ThreadPoolExecutor(2) as threads:
        rewards = list(threads.map(_run, texts))
        child = threads.submit(subprocess.Popen, _NEVER, preexec_fn=_limit, start_new_session=True).result(LONG)
    try:
        child.wait(SHORT)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
    return rewards, child.wait(LONG)


def coroutines(texts: list[str]) -> tuple[list[float], object]:
    """``asyncio``'s subprocesses, on a thread with a loop of its own, as TRL calls asynchronous rewards."""

    async def one(text: str) -> float:
        child = await asyncio.create_subprocess_exec(*_program(text), stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(child.communicate(), LONG)
        return float(out)

    async def everything() -> tuple[list[float], object]:
        rewards = await asyncio.gather(*map(one, texts))
        child = await asyncio.create_subprocess_exec(*_NEVER)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), SHORT)
        child.terminate()
        return list(rewards), await asyncio.wait_for(child.wait(), LONG)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, everything()).result()


def forks(texts: list[str]) -> tuple[list[float], object]:
    """``os.fork`` on another thread, the answer through a pipe, SIGTERM after the limit."""
    rewards: list[float] = []
    ends: list[int] = []

    def fork(score: Callable[[str], float], text: str, seconds: float) -> None:
        reads, writes = os.pipe()
        if not (child := os.fork()):
            try:
                os.write(writes, json.dumps(score(text)).encode())
            finally:
                os._exit(0)
        os.close(writes)
        limit = threading.Timer(seconds, os.kill, (child, signal.SIGTERM))
        limit.start()
        with os.fdopen(reads, "rb") as answer:
            rewards.extend([json.loads(said)] if (said := answer.read()) else [])
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        limit.cancel()

    for score, text, seconds in (*((scored, text, LONG) for text in texts), (endless, "", SHORT)):
        thread = threading.Thread(target=fork, args=(score, text, seconds))
        thread.start()
        thread.join()
    return rewards, ends


def alarm(texts: list[str]) -> tuple[list[float], object]:
    """No child: a time limit in the training's own process, by an alarm whose handler raises."""

    def too_late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_late)
    rewards = [scored(text) for text in texts]
    signal.setitimer(signal.ITIMER_REAL, SHORT)
    try:
        return rewards, _waiting("")
    except TimeoutError:
        return rewards, "late"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


KINDS: dict[str, Callable[[list[str]], tuple[list[float], object]]] = {
    "process": process,
    "limits": limits,
    "pool": pool,
    "executor-fork": executor("fork"),
    "executor-forkserver": executor("forkserver"),
    "executor-spawn": executor("spawn"),
    "program": program,
    "session": session,
    "coroutines": coroutines,
    "forks": forks,
    "alarm": alarm,
}


# -- trainings -----------------------------------------------------------------------------------------------------


def trained(kind: str, folder: Path, watched: bool, steps: int = 2) -> dict[str, Any]:
    """Train with a sandbox; return the parameters' hash, the rewards, and how programs without an end have ended."""
    from memprof import MemProfCallback
    from tests.integrations.runs import checkpoint, grpo

    sandbox = Sandbox(KINDS[kind])
    callbacks = [MemProfCallback(folder / "records", every=1, table=False)] if watched else []
    settings = {"max_steps": steps, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 6}
    trainer = grpo(checkpoint(folder), folder / "out", callbacks, reward=sandbox, beta=0.0, **settings)
    trainer.train()
    digest = hashlib.sha256()
    for name, parameter in sorted(trainer.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    recorded = sorted((folder / "records").glob("*.pickle"))
    if len(recorded) != (steps if watched else 0):
        raise SystemExit(f"{len(recorded)} steps were recorded")
    return {"parameters": digest.hexdigest(), "rewards": sandbox.rewards, "ends": sandbox.ends}


def _in_a_process(kind: str, watched: bool) -> dict[str, Any]:
    """Train in a process of its own; add its exit code, and that it hung."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, kind, folder, "watched" if watched else "alone"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG)
        except subprocess.TimeoutExpired:
            return {"hung": True}
    if done.returncode != 0:
        return {"exit": done.returncode, "error": done.stderr[-400:]}
    return {"exit": 0, **json.loads(done.stdout.strip().splitlines()[-1])}


def _newest_source() -> float:
    """Return when a file that the trainings import was changed last."""
    folders = (ROOT / name for name in ("memprof", "integrations", "reports", "benchmarks/recording", "tests"))
    return max(path.stat().st_mtime for folder in folders for path in folder.rglob("*.py"))


@contextlib.contextmanager
def _load(processes: int) -> Iterator[None]:
    """Keep the machine busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@click.command(help=__doc__)
@click.option("--rounds", default=50, show_default=True)
@click.option("--load", default=2, show_default=True, help="Processes that only compute meanwhile.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), metavar="KIND", help="Default: all.")
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(rounds: int, load: int, kinds: tuple[str, ...], path: Path | None) -> None:
    found: dict[str, dict[str, int]] = {}
    unchanged = _newest_source()
    with _load(load):
        for kind in kinds or KINDS:
            expected = _in_a_process(kind, watched=False)
            if expected.get("exit") != 0:
                raise SystemExit(f"{kind} fails without memprof: {expected}")
            different = {"alone": 0, "watched": 0}
            for number in range(1, rounds + 1):
                for way in different:
                    if (one := _in_a_process(kind, way == "watched")) != expected:
                        different[way] += 1
                        click.echo(f"{kind}, {way}: {json.dumps(one)}\n  and not {json.dumps(expected)}", err=True)
                if _newest_source() != unchanged:
                    raise SystemExit(f"{kind}, round {number}: the sources were edited meanwhile")
                click.echo(f"{kind}: {number} of {rounds}, different ones: {json.dumps(different)}", err=True)
            found[kind] = different
    write_result({"what": "rewards with sandboxes", "rounds": rounds, "load": load, "different": found}, path)
    if any(different["watched"] for different in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    for way in sys.argv[3:]:
        print(json.dumps(trained(sys.argv[1], Path(sys.argv[2]), way == "watched")))
