"""Errors a user can cause, and the exit code each one ends the command line with.

MemprofError
├── AboveLimit        1  a gate that was asked for did not hold
├── UsageError        2  the request makes no sense
├── InputError        3  a file cannot be used
│   └── UnsafePickle  3  a pickle that wants to run code
└── DoesNotFit        4  the simulated run needs more memory than there is
"""

from __future__ import annotations

__all__ = ["AboveLimit", "DoesNotFit", "InputError", "MemprofError", "UnsafePickle", "UsageError"]


class MemprofError(Exception):
    """One clear sentence for the user; ``exit_code`` is the process's."""

    exit_code = 1


class AboveLimit(MemprofError):
    """A run needs more memory than the gate allows (``compare --fail-above``); everything asked for was written."""


class UsageError(MemprofError):
    """Options or arguments that cannot be satisfied."""

    exit_code = 2


class InputError(MemprofError):
    """A file that cannot be read, understood or written."""

    exit_code = 3


class UnsafePickle(InputError):
    """A pickle that names a global; genuine snapshots never do."""


class DoesNotFit(MemprofError):
    """The run needs more memory than the device has."""

    exit_code = 4
