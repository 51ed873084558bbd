"""The documentation's code blocks, and the marks that say how a test treats them.

Every fenced ``sh``, ``bash`` or ``console`` block is run, line by line, where the files it names exist, with
a model of two narrow layers for any model of a hub and without searches (:func:`tests.workspace.shortened`). A comment
directly above a block says where that is not done as it stands::

    <!-- test: instead `memprof plan --model tiny.json --gpu 24GB`, because six simulations take minutes -->
    <!-- test: not run, because it installs packages -->
    <!-- test: heavy, because a test of tests/examples runs the same script smaller -->
    <!-- test: exit 4 -->

A *heavy* block is run by ``make test-all`` alone. Several *instead* comments replace a block by several commands. A
``python`` block is compiled; it runs, too, where ``<!-- test: run -->`` stands above it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELLS = ("sh", "bash", "console", "shell")

_BLOCK = re.compile(r"((?:^[ ]*<!-- test: .*? -->\n\n?)*)^([ ]*)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- test: (.*?) -->", re.DOTALL)
_INSTEAD = re.compile(r"instead `([^`]+)`, because \S.*", re.DOTALL)
_COMMENT = re.compile(r"(?:^|\s)#.*$")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``marks`` are the words of the comments above it."""

    page: Path
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> bool:
        """Whether a comment says that it is not run, and why."""
        return any(mark.startswith("not run, because ") for mark in self.marks)

    @property
    def heavy(self) -> bool:
        """Whether a comment leaves it to ``make test-all``, and why."""
        return any(mark.startswith("heavy, because ") for mark in self.marks)

    @property
    def runs(self) -> bool:
        """Whether a comment says that a Python block runs."""
        return "run" in self.marks

    @property
    def exit_code(self) -> int:
        """With which code its commands end."""
        return next((int(mark.removeprefix("exit ")) for mark in self.marks if mark.startswith("exit ")), 0)

    @property
    def commands(self) -> list[str]:
        """What is run: the commands of the comments above the block, or else its own."""
        return [m.group(1) for mark in self.marks if (m := _INSTEAD.fullmatch(mark))] or commands_in(self.text)

    @property
    def unknown_marks(self) -> list[str]:
        """Comments that say nothing this module understands; a reason is part of what is understood."""
        known = (r"run", r"exit \d", r"(?:not run|heavy), because \S.*")
        return [
            mark
            for mark in self.marks
            if not _INSTEAD.fullmatch(mark) and not any(re.fullmatch(form, mark, re.DOTALL) for form in known)
        ]


def documented_pages() -> list[Path]:
    """The pages whose commands people copy."""
    return [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        marks, indent, language, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
        line = text.count("\n", 0, match.end(1)) + 1
        found.append(Block(page, line, language, "".join(lines), tuple(_MARK.findall(marks))))
    return found


def commands_in(text: str) -> list[str]:
    """Commands of a shell block: continued lines joined, comments, prompts and a transcript's output left out."""
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines()]
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    bare = [_uncommented(line) for line in (prompted or lines)]
    return [line for line in bare if line]


def _uncommented(line: str) -> str:
    match = _COMMENT.search(line)
    return (line[: match.start()] if match else line).strip()


def memprof_commands(command: str) -> list[list[str]]:
    """The calls of ``memprof`` in a command line, as words: ``["report", "run.pickle"]``."""
    calls = []
    for part in re.split(r"&&|\|\||[|;]", command):
        try:
            words = shlex.split(part)
        except ValueError:
            continue
        while words and re.match(r"\w+=", words[0]):  # MEMPROF=0 memprof ...
            words.pop(0)
        for i, word in enumerate(words):
            if word == "memprof" and len(words) > i + 1 and (i == 0 or words[i - 1] == "-m"):
                calls.append(words[i + 1 :])
                break
    return calls
