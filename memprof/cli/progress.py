"""Show on a terminal that work goes on; a pipe gets nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from memprof.units import format_bytes


@contextmanager
def working(what: str, path: Path | None = None) -> Iterator[None]:
    """Show a spinner next to ``what``, and how much has been read of ``path`` if it is on another machine."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as status:
        if path is None or "://" not in str(path):
            yield
            return
        from memprof.snapshot.remote import reporting_reads

        with reporting_reads(lambda n, size: status.update(Text(f"{what}: {read_of(n, size)}"))):
            yield


def read_of(n_bytes: int, size: int | None) -> str:
    """Return how much of a file has been read; its size is not known if ``None``."""
    return format_bytes(n_bytes) if size is None else f"{format_bytes(n_bytes)} of {format_bytes(size)}"


@contextmanager
def progress(what: str = "Simulating") -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar; yield a function to call with ``(done, asked)``, or None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, left="")
        started = monotonic()

        def told(done: int, asked: int) -> None:
            bar.update(task, completed=done, total=asked, left=time_left(monotonic() - started, done, asked))

        yield told


def time_left(seconds: float, done: int, asked: int) -> str:
    """Say how long the rest takes at most, at the speed so far: a search can end sooner."""
    if not done or done >= asked:
        return ""
    left = seconds / done * (asked - done)
    return f"at most {left / 60:.0f} min left" if left >= 90 else f"at most {max(left, 1):.0f} s left"
