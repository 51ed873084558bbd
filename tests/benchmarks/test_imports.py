"""Benchmarks are run rarely and are not type-checked: what they import from memprof has to be there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples")


def _imported() -> Iterator[tuple[str, str, str]]:
    """``(file, module, name)`` of every ``from memprof... import name``, those inside functions too."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("memprof", "benchmarks"):
                yield from ((str(path.relative_to(ROOT)), str(node.module), alias.name) for alias in node.names)


def test_what_benchmarks_and_examples_import_is_there() -> None:
    pytest.importorskip("trl")
    missing = []
    found = list(_imported())
    for file, module, name in found:
        home = import_module(module)
        if not hasattr(home, name) and not (hasattr(home, "__path__") and find_spec(f"{module}.{name}")):
            missing.append(f"{file}: from {module} import {name}")
    assert len(found) > 100
    assert missing == []
