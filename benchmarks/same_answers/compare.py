"""Compare two collections answer by answer, and name each JSON path that differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import click

from .collect import ABOUT, read_answer

# Named where they stand, each with its reason. Nothing else is left out: the questions name files relative to one
# folder, so no answer holds a path of the snapshots, and no report says when it was written.
IGNORED = {
    "source.versions.memprof": "a simulation is recorded by the version that is compared",
}
_OWN_FRAMES = "(memprof's own code)"
_WIDTH = 80
_INDENT = 14

Keys = tuple["str | int", ...]


class Presence(Enum):
    """What is said of a value that one side lacks, which no JSON value can be."""

    ABSENT = "(absent)"
    COLLECTED = "(collected)"


@dataclass(frozen=True)
class Difference:
    """One place in an answer, and what stands there before and after."""

    path: Keys
    before: Any
    after: Any

    def __str__(self) -> str:
        keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return keys.lstrip(".") or "(the whole answer)"


@dataclass
class Comparison:
    """The differences of every answer, and how many values each ignored key hid."""

    answers: dict[str, list[Difference]] = field(default_factory=dict)
    ignored: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not any(self.answers.values())


def differences(before: Any, after: Any, path: Keys = ()) -> Iterator[Difference]:
    """Walk two JSON values side by side, and yield each place where they differ.

    The order of an object's keys is no difference; 1, 1.0 and true are three values.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, Presence.ABSENT), after.get(key, Presence.ABSENT), (*path, key))
    elif isinstance(before, list) and isinstance(after, list):
        for i in range(max(len(before), len(after))):
            one = before[i] if i < len(before) else Presence.ABSENT
            other = after[i] if i < len(after) else Presence.ABSENT
            yield from differences(one, other, (*path, i))
    elif type(before) is not type(after) or before != after:
        yield Difference(path, before, after)


def without_places(answer: Any, own_code: Sequence[str]) -> Any:
    """Replace in every ``stack`` what a rebuild or another checkout changes by itself.

    A simulation records its own process: consecutive frames of memprof's code become one without file, line
    and function; of the libraries' frames the folder of the environment is left out.
    """
    if isinstance(answer, list):
        return [without_places(part, own_code) for part in answer]
    if not isinstance(answer, dict):
        return answer
    return {
        key: _frames(value, own_code) if key == "stack" and isinstance(value, list) else without_places(value, own_code)
        for key, value in answer.items()
    }


def _frames(stack: list[str], own_code: Sequence[str]) -> list[str]:
    frames: list[str] = []
    for frame in stack:
        own = any(frame.startswith((f"{place}/", f"{place}:")) for place in own_code)
        if not own:
            frames.append(re.sub(r"^/.*/site-packages/", "", frame))
        elif frames[-1:] != [_OWN_FRAMES]:
            frames.append(_OWN_FRAMES)
    return frames


def compare(
    before: Path,
    after: Path,
    *,
    ignored: Sequence[str] = (),
    screens: bool = False,
    kinds: Sequence[str] | None = None,
) -> Comparison:
    """Compare every answer of two collections; one that only one of them holds differs.

    ``ignored`` are keys, or several joined by dots as they follow each other, wherever they stand.
    ``screens`` compares printed text too; ``kinds`` takes only these kinds of questions.
    """
    told = Comparison(ignored=dict.fromkeys(ignored, 0))
    names = [_names(folder, kinds) for folder in (before, after)]
    places = [_own_code(folder) for folder in (before, after)]
    for name in sorted(names[0] | names[1]):
        one, other = (
            _comparable(read_answer(folder, name), name, own) if name in held else None
            for folder, own, held in zip((before, after), places, names, strict=True)
        )
        if not screens and any(record["screen"] for record in (one, other) if record is not None):
            continue
        if one is None or other is None:
            told.answers[name] = [Difference((), _presence(one), _presence(other))]
        else:
            told.answers[name] = _kept(differences(one, other), told.ignored)
    return told


def _presence(record: dict[str, Any] | None) -> Presence:
    return Presence.ABSENT if record is None else Presence.COLLECTED


def _kept(found: Iterator[Difference], ignored: dict[str, int]) -> list[Difference]:
    """Leave out what stands below an ignored key, and count it."""
    kept = []
    for difference in found:
        keys = "." + ".".join(part for part in difference.path if isinstance(part, str)) + "."
        hiding = next((key for key in ignored if f".{key}." in keys), None)
        if hiding is None:
            kept.append(difference)
        else:
            ignored[hiding] += 1
    return kept


def _names(folder: Path, kinds: Sequence[str] | None) -> set[str]:
    found = {path.relative_to(folder).as_posix().removesuffix(".json.gz") for path in folder.rglob("*.json.gz")}
    return {name for name in found if kinds is None or name.split("/")[0] in kinds}


def _own_code(folder: Path) -> list[str]:
    about = folder / ABOUT
    if not about.is_file():
        raise click.UsageError(f"{folder} holds no {ABOUT}; write it with: python -m benchmarks.same_answers collect")
    own: list[str] = json.loads(about.read_text(encoding="utf-8"))["own_code"]
    return own


def _comparable(record: dict[str, Any], name: str, own_code: Sequence[str]) -> dict[str, Any]:
    """Take places out of simulations alone: the stacks of a file are the file's, and must stay as they are."""
    return without_places(record, own_code) if name.startswith("simulate/") else record


def lines(told: Comparison, reasons: Mapping[str, str], most: int = 10) -> Iterator[str]:
    """Say of every answer whether it is equal, with the first ``most`` differences, in 80 columns."""
    for name, found in told.answers.items():
        yield f"{'differs' if found else 'equal  '}  {name}" + (f": {len(found)} values" if found else "")
        for difference in found[:most]:
            yield f"    {difference}"
            yield from (
                f"      {label:6}  {value}"
                for label, value in zip(("before", "after"), _shown(difference), strict=True)
            )
        if len(found) > most:
            yield f"    and {len(found) - most} more"
    for key, hidden in told.ignored.items():
        yield f"ignored  {key}: {hidden} values differ"
        yield f"         {reasons.get(key, 'asked for with --ignore')}"
    differing = sum(1 for found in told.answers.values() if found)
    yield f"{len(told.answers)} answers compared, {differing} differ"


def _shown(difference: Difference) -> tuple[str, str]:
    """Write both values, cut to the width, from shortly before the place where they part."""
    texts = [
        value.value if isinstance(value, Presence) else json.dumps(value, ensure_ascii=False)
        for value in (difference.before, difference.after)
    ]
    room = _WIDTH - _INDENT
    parting = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, parting - room // 3) if max(map(len, texts)) > room else 0
    first, second = (_cut(text, start, room) for text in texts)
    return first, second


def _cut(text: str, start: int, room: int) -> str:
    head = "…" if start else ""
    rest = text[start:]
    return head + (rest if len(head) + len(rest) <= room else rest[: room - len(head) - 1] + "…")
