"""Define the errors a user can cause, each with the exit code of the command line.

MemprofError
├── AboveLimit        1  a run exceeds the limit given to ``compare --fail-above``
├── UsageError        2  the request makes no sense
├── InputError        3  a file cannot be used
│   └── UnsafePickle  3  a pickle tries to run code
└── DoesNotFit        4  the run needs more memory than the device has
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra. It names a checkout, because no package index has memprof."""
    older = " (TRL 1.16 requires Python 3.11 or later)" if extra == "trl" and sys.version_info < (3, 11) else ""
    return f"pip install '.[{extra}]' in a checkout of memprof{older}"


def import_for(wanted: str, module: str, extras: Mapping[str, str]) -> Any:
    """Import the module that holds ``wanted``.

    Raises:
        ModuleNotFoundError: a package is not installed; of those in ``extras`` it says by which extra it would be.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in extras:
            raise
        command = how_to_install(extras[package])
        raise ModuleNotFoundError(f"{wanted} needs {package}: {command}", name=package) from missing


def did_you_mean(word: str, names: Iterable[str], most: int = 2) -> str:
    """Return `` (did you mean A or B?)`` for the names that a misspelt word is near; empty where none is.

    Args:
        word: what was typed.
        names: what there is; of a mapping the values are shown.
        most: names at most.
    """
    from difflib import get_close_matches

    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    cutoff = 0.75 if len(word) <= 4 else 0.6  # one letter of three is another word: ppo is not dpo
    near = dict.fromkeys(str(shown[name]) for name in get_close_matches(word, shown, most, cutoff))
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def one_line(text: object) -> str:
    """Return text as one line, such as a file's name, with control characters shown instead of obeyed."""
    words = " ".join(str(text).splitlines())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in words)


class MemprofError(Exception):
    """Tell the user in one clear sentence what is wrong; ``exit_code`` is the exit code of the process.

    The sentence may hold somebody's file name or words of another program: it stays one line, and control characters
    are shown instead of obeyed.
    """

    exit_code = 1

    def __str__(self) -> str:
        return one_line(super().__str__())


class AboveLimit(MemprofError):
    """Report a run above the limit of ``compare --fail-above``, raised after all output was written."""


class UsageError(MemprofError):
    """Report options or arguments that cannot be satisfied."""

    exit_code = 2


class InputError(MemprofError):
    """Report a file that cannot be read, understood or written."""

    exit_code = 3


class UnsafePickle(InputError):
    """Report a pickle that names a global; genuine snapshots never do."""


class DoesNotFit(MemprofError):
    """Report a run that needs more memory than the device has."""

    exit_code = 4
