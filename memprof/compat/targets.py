"""Declare one name of another package that memprof uses, and find it in what is installed.

The tables beside this file (``trl.py``, ``transformers.py``, ``torch.py`` ...) are made of :class:`Target` and import
none of the packages they are about: a target's module is imported when the target is looked up.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

#: What :meth:`Target.find` returns for a name that is not there.
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT", "__bool__": lambda self: False})()

#: How a name is used. ``CALLED``: our call must bind. ``REPLACED``: by a function of ours, or overridden in a subclass,
#: which must take whatever the package passes. ``READ``: it must be there. ``ASSIGNED``: an attribute of instances,
#: which no class shows; see :mod:`memprof.compat.assignments`. ``LOCAL``: a local variable of the function ``used_in``.
#: ``KEY``: a key, or an attribute given by its name, that the function ``used_in`` has as a constant text.
CALLED, REPLACED, READ, ASSIGNED, LOCAL, KEY = "called", "replaced", "read", "assigned", "local", "key"


class Missing(AttributeError):
    """Report a target that is not in the installed package; the message names it."""


@dataclass(frozen=True)
class Target:
    """One name of another package.

    Attributes:
        module: where it is imported from, dotted.
        path: the name inside the module, dotted: ``"GRPOTrainer._compute_loss"``.
        signature: the arguments we pass or receive, ``"(self, model, inputs)"``; None where nothing is called, or where
            the package does not say (C functions). Rules: :mod:`memprof.compat.signatures`.
        how: ``CALLED``, ``REPLACED``, ``READ``, ``ASSIGNED``, ``LOCAL`` or ``KEY``.
        needed_by: features that are refused without it.
        optional_for: features that work without it, with a note.
        consequence: what those cannot do then, a clause: "phase generate cannot be marked".
        or_else: other paths that serve as well, newest first (``"module:path"`` in another module).
        used_in: function, or table of names, that must still name it: replacing what nobody calls changes nothing.
            It is in the same module, or in another: ``"module:path"``. Two are ``"newer or older"``.
        assigned_in: with ``ASSIGNED``, further classes (``"module:Class"``) whose code may assign it.
        build: "cuda" for what only torch's CUDA and ROCm builds have.
    """

    module: str
    path: str
    signature: str | None = None
    how: str = CALLED
    needed_by: tuple[str, ...] = ()
    optional_for: tuple[str, ...] = ()
    consequence: str = ""
    or_else: tuple[str, ...] = ()
    used_in: str = ""
    assigned_in: tuple[str, ...] = ()
    build: str = ""

    @cached_property  # set on a foreign object each step, it would be a new string each time
    def name(self) -> str:
        """Return the last part of the path: the attribute's own name."""
        return self.path.rpartition(".")[2]

    @property
    def names(self) -> list[str]:
        """Return the attribute's name, then those of its substitutes."""
        return [path.rpartition(".")[2] for _, path in self.places]

    @property
    def owner(self) -> str:
        """Return the path of the class or module the attribute belongs to; empty for the module itself."""
        return self.path.rpartition(".")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def places(self) -> list[tuple[str, str]]:
        """Module and path of the name, then of what serves in its stead."""
        found = [(self.module, self.path)]
        for place in self.or_else:
            module, colon, path = place.partition(":")
            found.append((module, path) if colon else (self.module, place))
        return found

    @property
    def user(self) -> tuple[str, str]:
        """Module and path of ``used_in``."""
        module, colon, path = self.used_in.partition(":")
        module, path = (module, path) if colon else (self.module, self.used_in)
        *newer, oldest = path.split(" or ")
        return module, next((name for name in newer if look_up(module, name) is not ABSENT), oldest)

    def find(self) -> Any:
        """Return the object, or what serves in its stead; ``ABSENT`` where neither is there."""
        return next((found for module, path in self.places if (found := look_up(module, path)) is not ABSENT), ABSENT)

    def get(self) -> Any:
        """Return the object; Missing where it is not there, which ``require()`` of a feature says before, in a
        sentence. Look it up when a feature is entered, not inside its loops."""
        found = self.find()
        if found is ABSENT:
            raise Missing(f"{self.path} is not in {self.module}")
        return found

    def place(self) -> tuple[Any, str]:
        """Return the class or module that holds the name, and the name: where a replacement is written; Missing as
        :meth:`get`."""
        for module, path in self.places:
            if look_up(module, path) is not ABSENT:
                owner, _, name = path.rpartition(".")
                return (look_up(module, owner) if owner else importlib.import_module(module)), name
        raise Missing(f"{self.path} is not in {self.module}")

    def of(self, instance: Any, default: Any = None) -> Any:
        """Return the attribute of an object; ``default`` where it has none."""
        return getattr(instance, self.name, default)

    @property
    def is_loaded(self) -> bool:
        """Tell whether the module, or one that serves in its stead, has been imported to its end."""
        return any(_is_whole(sys.modules.get(module)) for module, _ in self.places)


#: Declare a target that is used so: module, path and the rest as of :class:`Target`.
replaced, read, assigned, local, keyed = (partial(Target, how=how) for how in (REPLACED, READ, ASSIGNED, LOCAL, KEY))


def optional(consequence: str, features: tuple[str, ...] = ("callback",)) -> Any:
    """Return the arguments of targets that ``features`` work without, with a note of the ``consequence``."""
    return {"optional_for": features, "consequence": consequence}


def look_up(module: str, path: str) -> Any:
    """Import ``module`` and return ``path`` inside it; ``ABSENT`` where either is missing."""
    try:
        found = importlib.import_module(module)
        for part in filter(None, path.split(".")):  # an empty path is the module's own
            found = getattr(found, part)
    except (ImportError, AttributeError, RuntimeError, OSError):  # transformers' lazy modules raise RuntimeError
        return ABSENT
    return found


def failed_import(module: str) -> str:
    """Say why a module that is installed cannot be imported; empty where it can, or is not there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name or "")
        return "" if module.startswith(missing) else f"no module named {missing}"
    except (ImportError, RuntimeError, OSError) as error:  # OSError: a library that torch loads itself is missing
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(". ")
    return ""


def _is_whole(module: Any) -> bool:
    """Tell whether a module's import has ended; before that, names are missing."""
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)

