"""Find the text of the program's own files: as recorded with a snapshot, or below a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memprof.files import is_newer, read_source
from memprof.report.allocations import SourceLine
from memprof.snapshot.recorded_run import SourceFile
from memprof.text import clean_text

_LONGEST = 4 << 20
# No call begins on such a line.
_NO_CALL = re.compile(r"\s*(?:#.*)?$")


@dataclass(frozen=True)
class SourceText:
    """The text of a file.

    Attributes:
        lines: its lines, from the beginning.
        cut: whether the file goes on.
        doubt: why it may not be what ran, as a sentence; "" if nothing speaks against it.
    """

    lines: tuple[str, ...]
    cut: bool = False
    doubt: str = ""


def recorded_texts(files: Iterable[SourceFile]) -> dict[str, SourceText]:
    """Return the texts that a recording has, by path."""
    doubt = "The file changed after recording began; lines may have moved."
    return {
        file.path: SourceText(tuple(file.text.split("\n")), file.cut, doubt if file.edited else "") for file in files
    }


def texts_below(folder: Path, paths: Iterable[str], created: str | None) -> dict[str, SourceText]:
    """Return the texts of those files that lie below a folder under the last parts of their paths.

    Args:
        folder: such as a checkout of the program.
        paths: as in the stacks; of each the longest end that exists below the folder is taken.
        created: when the snapshot was written, in ISO 8601, if known; files changed later are doubtful.
    """
    found = {}
    for path in paths:
        parts = [part for part in re.split(r"[/\\]+", path) if part not in ("", ".", "..")]
        ends = (folder.joinpath(*parts[i:]) for i in range(len(parts)))
        file = next((end for end in ends if end.is_file()), None)
        if file is not None and (text := _read(file, created)) is not None:
            found[path] = text
    return found


def _read(file: Path, created: str | None) -> SourceText | None:
    text = read_source(file, _LONGEST)
    if text is None:
        return None
    lines, is_cut = tuple(clean_text(text, _LONGEST).split("\n")), len(text) == _LONGEST
    written = _seconds(created)
    if written is None or not is_newer(file, written):
        return SourceText(lines, is_cut)
    return SourceText(lines, is_cut, "The file changed after the snapshot was written; lines may have moved.")


def _seconds(created: str | None) -> float | None:
    try:
        return None if created is None else datetime.fromisoformat(created).timestamp()
    except ValueError:
        return None


def mismatch(text: SourceText, lines: Iterable[SourceLine]) -> str:
    """Say in a sentence why a text cannot be what ran; "" if it can."""
    for line in lines:
        if line.line > len(text.lines):
            if text.cut:
                continue
            return f"It has {len(text.lines)} lines, and a stack names line {line.line}: it is another version."
        if line.line and _NO_CALL.match(text.lines[line.line - 1]):
            return f"No code is on line {line.line}, which a stack names: it is another version."
    return ""


def by_file(lines: Iterable[SourceLine]) -> Mapping[str, list[SourceLine]]:
    """Group lines by file, in the order of the first of each, sorted by number."""
    files: dict[str, list[SourceLine]] = {}
    for line in lines:
        files.setdefault(line.file, []).append(line)
    return {file: sorted(found, key=lambda line: line.line) for file, found in files.items()}
