"""Read which versions are installed, and say which ones a feature was tested with."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec


@dataclass(frozen=True)
class Range:
    """Versions of a package, inclusive. ``minimum``: older ones are refused; ``newest``: the last one tested."""

    minimum: str
    newest: str

    def __str__(self) -> str:
        return self.minimum if self.minimum == self.newest else f"{self.minimum} to {self.newest}"


#: What runs TRL's own step: simulation, planning, the lean trainer.
EXECUTING = {
    "trl": Range("1.16", "1.16"),
    "transformers": Range("5.0", "5.24"),
    "peft": Range("0.21", "0.21"),
    "accelerate": Range("1.10", "1.15"),
    "torch": Range("2.6", "2.15"),
}
#: What watches a run: callback, ``memprof run``, ``attach``, recording.
WATCHING = {"trl": Range("0.19", "1.16"), "transformers": Range("4.50", "5.24"), "torch": Range("2.2", "2.15")}
#: Packages as their authors write them.
SPOKEN = {
    "trl": "TRL",
    "peft": "PEFT",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "torch": "PyTorch",
    "deepspeed": "DeepSpeed",
    "swift": "ms-swift",
    "runpy": "Python",
    "threading": "Python",
    "_thread": "Python",
}


def installed(package: str) -> str | None:
    """Return the version of a package without its build ("2.13.0" of "2.13.0+cpu"); None where it is not installed."""
    if package in sys.stdlib_module_names:
        return ".".join(map(str, sys.version_info[:3]))
    found = _of_distribution(package) or getattr(sys.modules.get(package), "__version__", None)
    return None if found is None else str(found).partition("+")[0]


@functools.cache
def _of_distribution(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to compare: (1, 16) of "1.16.0.dev0" and of "1.16"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
