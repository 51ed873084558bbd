"""Ask one version of memprof every question and keep its answers, one file each."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from .questions import Question, questions, snapshots_below

ABOUT = "about.json"

# Prints the folders of the package's own code: integrations/ and reports/ lie beside memprof/ in a checkout.
_OWN_FOLDERS = """
import importlib.util, json
packages = ("memprof", "memprof.integrations", "memprof.reports")
print(json.dumps([importlib.util.find_spec(name).submodule_search_locations[0] for name in packages]))
"""
_DEMO_SUMS = (
    *("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "step", "phase", "categories"),
    *("categories_requested", "details", "groups", "evidence"),
)
_DEMO_PHASE = ("phase", "step", "within", "peak_bytes", "peak_allocated_bytes", "categories")


@dataclass(frozen=True)
class Version:
    """One installed memprof: its executable, its version, its commit and the folders of its own code."""

    executable: Path
    version: str
    commit: str | None
    own_code: tuple[str, ...]

    @staticmethod
    def of(executable: Path) -> Version:
        """Ask the executable and the Python beside it.

        Raises:
            click.UsageError: there is no Python beside it, or it does not know memprof.
        """
        python = executable.with_name("python")
        try:
            told = subprocess.run([python, "-I", "-c", _OWN_FOLDERS], capture_output=True, text=True, check=True)
            version = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise click.UsageError(f"{executable}: not memprof in an environment of its own ({error}).") from None
        own = (*json.loads(told.stdout), str(executable))
        return Version(executable, version.stdout.strip(), _commit(Path(own[0]).parent), own)


def _commit(folder: Path) -> str | None:
    """Name the checkout's commit, with ``+changes`` where files differ from it; None without a checkout."""
    told = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return told.stdout.strip() or None


def collect(
    executable: Path, folders: dict[str, Path], out: Path, kinds: Sequence[str], *, jobs: int = 1, quick: bool = False
) -> None:
    """Write the answers of ``executable`` to ``<out>/<question>.json.gz``, and what gave them to ``about.json``.

    Processes run in a folder of their own that holds ``folders`` under their labels, so that no answer
    names the place of the snapshots. Kinds collected before stay.

    Raises:
        click.UsageError: ``out`` holds the answers of another version, or there are no snapshots.
    """
    version, files = Version.of(executable), snapshots_below(folders)
    if not any(files.values()):
        raise click.UsageError(f"No .pickle below {' or '.join(map(str, folders.values()))}.")
    about = _about(version, out)
    with TemporaryDirectory() as place:
        for label, folder in folders.items():
            (Path(place) / label).symlink_to(folder.resolve())
        for kind in kinds:
            asked, start = questions(kind, files, quick=quick), time.monotonic()
            _ask_all(asked, lambda question: _ask(executable, question, Path(place)), out, jobs)
            seconds = round(time.monotonic() - start, 1)
            about["collected"][kind] = {"answers": len(asked), "seconds": seconds}
            click.echo(f"{kind}: {len(asked)} answers in {seconds:.0f} s", err=True)
            (out / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _about(version: Version, out: Path) -> dict[str, Any]:
    """Describe what gives the answers, with the kinds that ``out`` holds of it already."""
    about = {
        "executable": str(version.executable),
        "version": version.version,
        "commit": version.commit,
        "own_code": list(version.own_code),
    }
    known = out / ABOUT
    before = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {**about, "collected": {}}
    collected = before.pop("collected")
    if before != about:
        raise click.UsageError(
            f"{out} holds answers of {before['executable']} at {before['commit']}; choose another folder."
        )
    out.mkdir(parents=True, exist_ok=True)
    return {**about, "collected": collected}


def _ask_all(asked: list[Question], ask: Callable[[Question], dict[str, Any]], out: Path, jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for question, answer in zip(asked, pool.map(ask, asked), strict=True):
            write_answer(out, question.name, answer)


def _ask(executable: Path, question: Question, place: Path) -> dict[str, Any]:
    """Run one command line, and keep its exit code, its messages and what it answered."""
    told = subprocess.run(
        [executable, *question.arguments], cwd=place, env=_environment(), capture_output=True, text=True
    )
    answer: Any = told.stdout.splitlines()
    if told.returncode == 0 and question.leaves:
        answer = {Path(name).stem: _sums(place / name) for name in question.leaves}
    elif told.stdout.startswith("{"):
        answer = json.loads(told.stdout)
    return {
        "arguments": list(question.arguments),
        "screen": question.screen,
        "exit_code": told.returncode,
        # The demo tells of each step's reward and each file: not an answer.
        "stderr": [] if told.returncode == 0 and question.leaves else told.stderr.splitlines(),
        "answer": answer,
    }


def _environment() -> dict[str, str]:
    """Give every process the same screen, and no path to another memprof than its own."""
    fixed = {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | fixed


def _sums(path: Path) -> dict[str, Any]:
    """Take from a report what does not depend on the clock or the addresses of one run."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return {
        "peak": {name: report["peak"][name] for name in _DEMO_SUMS},
        "own_peaks": report["own_peaks"],
        "phases": [{name: phase[name] for name in _DEMO_PHASE} for phase in report["phases"]],
    }


def write_answer(out: Path, name: str, answer: dict[str, Any]) -> None:
    """Write an answer as ``<out>/<name>.json.gz``; equal answers make equal files."""
    path = out / f"{name}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(answer).encode(), compresslevel=6, mtime=0))


def read_answer(out: Path, name: str) -> dict[str, Any]:
    """Read what :func:`write_answer` wrote."""
    read: dict[str, Any] = json.loads(gzip.decompress((out / f"{name}.json.gz").read_bytes()))
    return read
