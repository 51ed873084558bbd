"""Try wrong changes, one after the other, and see whether the tests say no.

    python -m benchmarks.mutations [--only WORD] [--processes N]

``list.toml`` holds them. Each is made in a throw-away copy of the checkout, where its test file is run (without
``heavy``), which has to pass there unchanged. Exit code 1: a change was not caught, or stands nowhere any more.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import click

from benchmarks.tabling import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

_FOLDERS = ("memprof", "reports", "integrations", "tests", "benchmarks", "examples", "docs")
_UNCHANGED = ("passes", "FAILS UNCHANGED")


class Mutation(NamedTuple):
    """Make ``old``, which stands once in ``file``, ``new``; ``test`` has to say no."""

    test: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip().splitlines()[0]}"


def mutations(only: str = "") -> list[Mutation]:
    """Read the list; ``only`` keeps those whose file or test holds that word."""
    listed = tomllib.loads(Path(__file__).with_name("list.toml").read_text(encoding="utf-8"))["tests"]
    found = [Mutation(part["test"], *wrong) for part in listed for wrong in part["wrong"]]
    return [m for m in found if only in m.file or only in m.test]


def copy_of(root: Path, folder: Path) -> Path:
    """Copy what tests need; the packages that stand beside memprof are links in it, so that the copy's are imported."""
    for name in _FOLDERS:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
    shutil.copy(root / "pyproject.toml", folder)
    for name in ("reports", "integrations"):
        (folder / "memprof" / name).symlink_to(folder / name)
    return folder


def says(copy: Path, test: str) -> int:
    """Run a test file (or what else pytest is to run) in a copy and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not heavy", *shlex.split(test)]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=900).returncode


def tried(copy: Path, mutation: Mutation) -> str:
    """Make a change in a copy, run its tests, undo it. Return ``caught``, or what happened instead."""
    path = copy / mutation.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        return f"stands {source.count(mutation.old)} times"
    _write(path, source.replace(mutation.old, mutation.new))
    code = says(copy, mutation.test)
    _write(path, source)
    return {0: "NOT CAUGHT", 1: "caught"}.get(code, f"pytest's exit code {code}")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)  # it may be of what stood there a second ago


def _results(chosen: list[Mutation], processes: int) -> Iterator[tuple[str, str]]:
    """Yield what happened to the tests unchanged, then to each change, in order."""
    copies: SimpleQueue[Path] = SimpleQueue()

    def in_a_copy(work: Mutation | str) -> str:
        copy = copies.get()
        result = tried(copy, work) if isinstance(work, Mutation) else _UNCHANGED[bool(says(copy, work))]
        copies.put(copy)
        return result

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as threads:
        for number in range(processes):
            copies.put(copy_of(ROOT, Path(folder, str(number))))
        work: list[Mutation | str] = [*dict.fromkeys(m.test for m in chosen), *chosen]
        yield from zip(map(str, work), threads.map(in_a_copy, work), strict=True)


@click.command(help=__doc__)
@click.option("--only", default="", help="Try those whose file or test holds this word.")
@click.option("--processes", default=2, show_default=True, help="Try so many at a time.")
def main(only: str, processes: int) -> None:
    chosen, bad = mutations(only), 0
    for what, result in _results(chosen, processes):
        bad += result not in ("caught", "passes")
        click.echo(f"{result:<12} {what}")
    click.echo(f"{len(chosen)} wrong changes; {bad} rows that are not as they should be.")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
