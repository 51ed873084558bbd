"""The documentation names files and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click import Context

from memprof.cli import main

ROOT = Path(__file__).resolve().parents[1]
NAMED = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES = [*NAMED, *sorted((ROOT / "docs").glob("*.md"))]

LINK = re.compile(r"\]\(([^)#\s]+)")
SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\s*memprof ([a-z]+)(.*?)(?:\s#.*)?$", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)(--?[a-z][a-z-]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_examples_use_commands_and_options_there_are(page: Path) -> None:
    for block in SHELL_BLOCK.findall(page.read_text(encoding="utf-8")):
        for name, rest in COMMAND.findall(block):
            command = main.get_command(Context(main), name)
            assert command is not None, f"{page.name}: no command {name}"
            known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
            assert set(OPTION.findall(rest)) <= known | {"--help"}, f"{page.name}: memprof {name}{rest}"
