"""Check a feature's targets when it is entered: refuse in one sentence what it needs, note what it can do without."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from memprof.compat import accelerate, optional_packages, peft, torch, torch_sharding, transformers, trl
from memprof.compat.assignments import assigns, keys_in, names_used
from memprof.compat.features import FEATURES, targets_for
from memprof.compat.signatures import fits, parameters_of, shown
from memprof.compat.targets import ABSENT, ASSIGNED, KEY, LOCAL, READ, Target, failed_import, look_up
from memprof.compat.versions import SPOKEN, Range, installed, is_installed, release
from memprof.errors import UsageError, how_to_install

_TABLES = (trl, transformers, accelerate, peft, torch, torch_sharding, optional_packages)

#: Every declared target.
TARGETS: tuple[Target, ...] = tuple(
    dict.fromkeys(
        target
        for table in _TABLES
        for value in vars(table).values()
        for target in (value.values() if isinstance(value, dict) else (value,))
        if isinstance(target, Target)
    )
)


def require(feature: str) -> None:
    """Check all that ``feature`` needs of other packages; call it where the feature is entered.

    Raises:
        UsageError: a package is not installed or too old, or has no longer what the feature needs of it.
    """
    asked = FEATURES[feature]
    for package, versions in asked.tested.items():
        if asked.imports or sys.modules.get(package) is not None:
            _require_version(asked.title, package, versions)
    names = targets_for(feature)
    needed = (target for target in TARGETS if names.intersection(target.needed_by))
    faults = _faults(needed, imports=asked.imports)
    first = next(faults, None)
    if first is None:
        return
    target, fault = first
    for module in ("torch", target.module) if asked.imports else ():
        if why := failed_import(module):
            package = spoken(module.partition(".")[0])
            raise UsageError(f"{asked.title} needs {package}, which is installed and cannot be imported: {why}.")
    further = sum(1 for _ in faults)
    also = f" ({further} more of its kind)" if further else ""
    tested = asked.tested.get(target.package)
    before = f"{asked.title} was tested with {spoken(target.package)} {tested}; " if tested else f"{asked.title}: "
    raise UsageError(f"{before}{fault}{also}.")


def missing(feature: str, of: Any = None) -> list[str]:
    """Return a note for each consequence of an optional target of ``feature`` that is not as expected.

    ``of``: the object the feature works on. Targets of its sisters' classes are left out: a trainer that is no
    ``GRPOTrainer`` misses none of its methods.
    """
    names = targets_for(feature)
    wanted = (target for target in TARGETS if names.intersection(target.optional_for) and _concerns(target, of))
    faults: dict[str, list[str]] = {}
    for target, fault in _faults(wanted, imports=FEATURES[feature].imports):
        faults.setdefault(target.consequence, []).append(fault)
    notes = [f"{consequence}: {'; '.join(dict.fromkeys(found))}" for consequence, found in faults.items()]
    return [note[:1].upper() + note[1:] for note in notes]


def fault_of(target: Target) -> str | None:
    """Return what is wrong with a target, naming it and the installed version; None if it is as declared."""
    package, difference, place = target.package, _difference(target), (target.module, target.path)
    if difference is None and target.used_in and not _is_used(target):
        place = target.user
        package = place[0].partition(".")[0]
        name = repr(target.name) if target.how == KEY else target.name
        difference = f"{place[1]} does not use {name}"
    if difference is None:
        return None
    if (where := _replaced_in(look_up(*place), package)) is not None:
        return f"{difference}: {where} has replaced that function"
    return f"{difference} in the {spoken(package)} that is installed, {installed(package)}"


def _replaced_in(found: Any, package: str) -> str | None:
    """Return the module of a function that stands in place of ``package``'s; None where it is a library's own."""
    module = getattr(found, "__module__", None)
    own = {*SPOKEN, package, "builtins", "functools", "memprof"}
    return module if isinstance(module, str) and module.partition(".")[0] not in own else None


def _difference(target: Target) -> str | None:
    absent = f"{target.path} is not"
    if target.how == ASSIGNED:
        return None if _is_assigned(target) else absent
    if target.how == LOCAL:
        return None if _is_used(target) else absent
    if target.how == KEY:  # there is nothing but its use
        return None
    found = target.find()
    if found is ABSENT:
        return absent
    parameters = parameters_of(found) if target.signature is not None and target.how != READ else None
    if parameters is not None and not fits(str(target.signature), parameters, target.how):
        return f"{target.path}{target.signature} is {target.name}{shown(parameters)}"
    return None


def _is_used(target: Target) -> bool:
    """Tell whether the function declared to use a target names it."""
    user = look_up(*target.user)
    if user is ABSENT:
        return False
    return target.name in (keys_in(user) if target.how == KEY else names_used(user))


def spoken(package: str) -> str:
    """Return a package's name as its authors write it."""
    return SPOKEN.get(package, package)


def _require_version(title: str, package: str, versions: Range) -> None:
    found = installed(package) if is_installed(package) else None
    if found is None:
        raise UsageError(f"{title} needs {spoken(package)}, which is not installed: {how_to_install('trl')}.")
    if release(found) < release(versions.minimum):
        raise UsageError(
            f"{title} needs {spoken(package)} {versions.minimum} or later, and {found} is installed: "
            f"pip install -U '{package}>={versions.minimum}'."
        )


def _faults(targets: Iterable[Target], *, imports: bool) -> Iterator[tuple[Target, str]]:
    for target in targets:
        if _applies(target, imports) and (fault := fault_of(target)) is not None:
            yield target, fault


def _applies(target: Target, imports: bool) -> bool:
    """Tell whether there is something to check; missing packages are optional, or the version check's."""
    if not (is_installed(target.package) if imports else target.is_loaded):
        return False
    if target.build != "cuda":
        return True
    version: Any = look_up("torch", "version")
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None))


def _concerns(target: Target, of: Any) -> bool:
    """Tell whether to check a target for ``of``: an instance of its class, or of another family. An attribute that the
    instance has needs no reading of its class, whose ``__init__`` ms-swift deletes."""
    if of is None or not target.is_loaded:
        return True
    if target.how == ASSIGNED and any(inspect.getattr_static(of, n, ABSENT) is not ABSENT for n in target.names):
        return False
    owner = look_up(target.module, target.owner)
    if not isinstance(owner, type) or isinstance(of, owner):
        return True
    return not (set(owner.__mro__) & set(type(of).__mro__)) - {object}


def _is_assigned(target: Target) -> bool:
    holders = [(target.module, target.owner)]
    holders += [(module, path) for module, _, path in (place.partition(":") for place in target.assigned_in)]
    names = [target.name, *(path.rpartition(".")[2] for path in target.or_else)]
    found = [holder for module, path in holders if (holder := look_up(module, path)) is not ABSENT]
    return any(assigns(holder, name) for holder in found for name in names)
