"""Only ``memprof/compat`` names private things of other packages."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap

import pytest

from memprof.compat.check import TARGETS
from tests import package_rules
from tests.compat.private_names import Found, defined_names, is_private, private_names

PACKAGES = sorted({package_rules.package_of(module) for module in package_rules.modules()} - {"compat"})

_READ_AS_TEXT = "a key of a config that was read from a file: nothing is looked up by it"
#: Module (or "" for any) and name -> why it may stand there.
ALLOWED = {
    ("", "_getframe"): "documented by Python",
    ("memprof.analysis.compare", "_name_or_path"): _READ_AS_TEXT,
    ("memprof.reports.document.page_title", "_name_or_path"): _READ_AS_TEXT,
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in package_rules.modules().items()}


@functools.cache
def ours() -> frozenset[str]:
    """All names memprof's modules define; those of the tables are other packages'."""
    return frozenset().union(*(defined_names(tree) for name, tree in trees().items() if not _in_compat(name)))


@functools.cache
def declared() -> frozenset[str]:
    """Private names in the tables, those of modules and classes on the way to them too."""
    paths = (place for target in TARGETS for place in target.places)
    return frozenset(part for place in paths for part in ".".join(place).split(".") if is_private(part))


def _in_compat(module: str) -> bool:
    return package_rules.package_of(module) == "compat"


def mentions(package: str) -> list[tuple[str, Found]]:
    """Foreign private names in a package's modules."""
    found = []
    for module, tree in trees().items():
        if package_rules.package_of(module) == package:
            there = private_names(tree, ours(), defined_names(tree), declared(), "memprof")
            found += [(module, one) for one in sorted(set(there))]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_names_nothing_private_of_other_packages(package: str) -> None:
    allowed = {*ALLOWED}
    found = [
        f"{module}:{one.line} {one.how}"
        for module, one in mentions(package)
        if (module, one.name) not in allowed and ("", one.name) not in allowed
    ]
    assert found == []


def test_nothing_is_allowed_that_nobody_needs() -> None:
    mentioned = [pair for package in PACKAGES for pair in mentions(package)]
    found = {pair for module, one in mentioned for pair in ((module, one.name), ("", one.name))}
    assert [pair for pair in ALLOWED if pair not in found] == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._C import thing", ["_C"]),
        ("from torch.utils import _pytree", ["_pytree"]),
        ("import torch._dynamo.config", ["_dynamo"]),
        ("torch._C.thing()", ["_C"]),
        ("trainer._step += 1", ["_step"]),
        ("getattr(trainer, '_step', None)", ["_step"]),
        ("setattr(trainer, '_unheard_of', 1)", ["_unheard_of"]),
        ("for name in ('_step', '_mine'): getattr(trainer, name)", ["_step"]),
        ("class A:\n  def f(self): return self._metrics", ["_metrics"]),
        ("class A:\n  def __init__(self): self._metrics = 1\n  def f(self): return self._metrics", []),
        ("import torch\ntorch.nn.Linear(1, 1).__dict__", []),
        ("from memprof._version import version\nthing._asdict", ["_asdict"]),
        ("other._mine, other._memprof_notes", []),
        ("'''_step is explained in a docstring'''", []),
    ],
)
def test_what_reading_finds(code: str, names: list[str]) -> None:
    tree = ast.parse(textwrap.dedent(code))
    found = private_names(tree, {"_mine", "_metrics"}, defined_names(tree), {"_step", "_metrics"}, "memprof")
    assert sorted({one.name for one in found}) == names


def test_private_methods_of_other_packages_are_overridden_by_declared_names_only() -> None:
    """A class of memprof's that derives from another package's: what it overrides there has to be known."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    # Keeps torch's wrapper off a mode; where torch has none, nobody calls it and nothing is missing.
    known = {"_should_skip_dynamo", *(name for target in TARGETS for name in target.names)}
    found = []
    for module in trees():
        if _in_compat(module) or module.endswith("__main__"):
            continue
        for kind in vars(_imported(module)).values():
            if isinstance(kind, type) and kind.__module__ == module:
                found += [f"{module}:{kind.__name__}.{name}" for name in _overridden(kind) - known]
    assert found == []


def _imported(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ImportError as error:  # needs a package that is not installed, such as Ray or TensorBoard
        return error


def _overridden(kind: type) -> set[str]:
    """Private methods a class takes over from classes that are not memprof's and not Python's own."""
    theirs = [base for base in inspect.getmro(kind)[1:] if _foreign(base)]
    methods = {n for n, v in vars(kind).items() if inspect.isroutine(v) or isinstance(v, property)}
    return {name for name in methods if is_private(name) and any(name in vars(base) for base in theirs)}


def _foreign(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "trl", "transformers", "accelerate", "peft")
