"""Show on a terminal that work goes on; a pipe gets nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress", "working"]


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner beside ``what``."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield


@contextmanager
def progress(what: str = "Simulating") -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar; yields what is called with ``(done, asked)``, or None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, asked: bar.update(task, completed=done, total=asked)
