"""Read what the path of a memory snapshot says of it: frameworks write rank, step, role, process and time there.

``layouts.toml`` lists what frameworks write. Other paths are read by their words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path, PurePath

import msgspec

from memprof.files import read_toml

#: A word of a path and the role it stands for.
ROLES = {
    "actor": "actor", "policy": "actor", "critic": "critic", "ref": "reference", "reference": "reference",
    "rollout": "rollout", "reward": "reward", "teacher": "teacher",
}  # fmt: skip

_RANK = re.compile(r"(?:^|[^a-z])rank[-_ .]?(\d{1,6})(?!\d)", re.IGNORECASE)
_STEP = re.compile(r"(?:^|[-_])(?:step|iteration|iter)[-_]?(\d{1,12})(_exit)?(?=[-_.]|$)", re.IGNORECASE)
_PID = re.compile(r"pid[-_]?(\d{1,10})(?!\d)", re.IGNORECASE)
_UNIX = re.compile(r"(?:^|time|_)(1\d{9}(?:\.\d{1,7})?)(?=[-_.])")
_WRITTEN = re.compile(r"(20\d{6})[-_](\d{4}(?:\d{2})?)(?!\d)")
_REPLICA = re.compile(r"replica[-_]?\d{1,6}", re.IGNORECASE)
_SAYS_MEMORY = re.compile(r"snapshot|memory|(?:^|[^a-z])(?:mem|oom)(?:[^a-z]|$)", re.IGNORECASE)
_OUT = re.compile(r"(?:^|[^a-z])oom(?:[^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class DumpName:
    """Hold what a path tells of a dump; None where it tells nothing.

    ``time`` is ``2026-01-12 10:33:05`` (UTC where the name has seconds since 1970, else as the framework wrote it);
    ``label`` is what else tells two dumps of one rank apart; ``out_of_memory`` that the framework wrote it for that;
    ``count`` numbers the dumps of one rank, where the framework counts them.
    """

    rank: int | None = None
    step: int | None = None
    role: str | None = None
    pid: int | None = None
    time: str | None = None
    label: str | None = None
    out_of_memory: bool = False
    count: int | None = None


class DumpLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of ``layouts.toml``, whose head explains the fields."""

    framework: str
    path: str
    example: str
    says: dict[str, str | int | bool]
    source: str
    out_of_memory: bool = False
    role: str | None = None


@lru_cache(maxsize=1)
def layouts() -> tuple[tuple[re.Pattern[str], DumpLayout], ...]:
    """Return the pattern and the row of every layout in ``layouts.toml``."""
    rows = msgspec.convert(read_toml(Path(__file__).with_name("layouts.toml"))["layout"], list[DumpLayout])
    return tuple((re.compile(rf"(?:.*/)?{row.path}"), row) for row in rows)


def dump_name(path: PurePath) -> DumpName | None:
    """Read a path relative to the folder that was given; None where nothing says that it is a memory snapshot."""
    for pattern, row in layouts():
        if (match := pattern.fullmatch(path.as_posix())) is not None:
            return _read(path, match.groupdict(), row.role, row.out_of_memory)
    name, folders = path.name, path.parts[:-1]
    rank, pid = _RANK.search(name), _PID.search(name)
    if rank is None and _SAYS_MEMORY.search(name) is None:
        return None
    steps = [match for part in (*folders, name) for match in _STEP.finditer(part)]
    said = {
        "rank": rank.group(1) if rank else None,
        "step": steps[0].group(1) if steps else None,
        "pid": pid.group(1) if pid else None,
    }
    return _read(path, said, None, _OUT.search(name) is not None or any(match.group(2) for match in steps))


def _read(path: PurePath, said: dict[str, str | None], role: str | None, out_of_memory: bool) -> DumpName:
    """Take what was found in a path; role, time and label where its words say them."""
    rank, step, pid, count = (None if (n := said.get(k)) is None else int(n) for k in ("rank", "step", "pid", "count"))
    label = (said.get("label") or "").lower() or next((p for p in path.parts[:-1] if _REPLICA.fullmatch(p)), None)
    return DumpName(rank, step, role or _role(path), pid, _time(path), label, out_of_memory, count)


def _role(path: PurePath) -> str | None:
    words = [word for part in path.parts for word in re.split(r"[^a-z]+", part.lower())]
    return next((ROLES[word] for word in words if word in ROLES), None)


def _time(path: PurePath) -> str | None:
    if (unix := _UNIX.search(path.name)) is not None:
        return datetime.fromtimestamp(float(unix.group(1)), timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    for part in reversed(path.parts):
        if (written := _WRITTEN.search(part)) is not None:
            day, clock = written.groups()
            hours = ":".join(clock[i : i + 2] for i in range(0, len(clock), 2))
            return f"{day[:4]}-{day[4:6]}-{day[6:]} {hours}"
    return None
