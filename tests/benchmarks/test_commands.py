"""Every command of the benchmarks that is offered, or named anywhere, is there and says what it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("truth", "reading", "recording", "simulator", "advice", "lean", "oom", "docs", "same_answers", "faults")
_NAMED = re.compile(r"python -m benchmarks\.([\w.]*\w)(?: ([a-z][\w-]*))?")


def group(folder: str) -> click.Group:
    found: click.Group = import_module(f"benchmarks.{folder}.__main__").main
    return found


def offered(folder: str) -> list[str]:
    return group(folder).list_commands(click.Context(group(folder)))


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder in GROUPS for name in offered(folder)])
def test_each_command_says_what_it_needs(folder: str, name: str) -> None:
    pytest.importorskip("trl")
    told = CliRunner().invoke(group(folder), [name, "--help"])
    assert told.exit_code == 0, told.exception
    assert told.output.startswith("Usage: ")
    prose = [line for line in told.output.splitlines() if "python -m benchmarks" not in line]
    assert all(len(line) <= 80 for line in prose)


@pytest.mark.parametrize("folder", GROUPS)
def test_a_folder_lists_its_commands_without_loading_them(folder: str) -> None:
    code = f"import sys; from benchmarks.{folder}.__main__ import main; main(['--help'], standalone_mode=False); "
    code += "assert not {'torch', 'trl', 'numpy', 'plotly'} & set(sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert all(f"  {name} " in told.stdout for name in offered(folder))


def test_a_command_that_is_not_there_is_refused() -> None:
    told = CliRunner().invoke(group("lean"), ["memorie"])
    assert told.exit_code == 2
    assert "No such command 'memorie'" in told.output


def test_commands_named_in_pages_and_docstrings_are_there() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    for folder in ("docs", "examples", "benchmarks", "memprof", "tests"):
        pages += [p for ending in ("*.md", "*.py") for p in (ROOT / folder).rglob(ending)]
    named = [(str(p.relative_to(ROOT)), *found) for p in pages for found in _NAMED.findall(p.read_text("utf-8"))]
    missing = [
        (page, folder, name)
        for page, folder, name in named
        if (name not in offered(folder) if folder in GROUPS and name else find_spec(f"benchmarks.{folder}") is None)
    ]
    assert len(named) > 60
    assert missing == []
