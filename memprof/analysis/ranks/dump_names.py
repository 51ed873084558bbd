"""Read what the path of a memory snapshot says of it: frameworks write rank, step, role, process and time there.

=============  =======================================================================================================
verl           ``step3/torch_memory_rank0_pid1234.pickle``, without a step ``20260112-1033/...``
slime          ``memory_snapshot_time1764200000.5_rank0_snapshot.pickle``
prime-rl       ``step_3/rank_0.pickle``
NeMo-RL        ``oom_train_rank0_pid1234_20260112-103305_1a2b3c4d.pickle``
torchtitan     ``step_000000000010/000000_step_10.pickle``, ``iteration_10/rank0_memory_snapshot.pickle``; ``..._exit``
               when memory ran out; ``replica_0`` between them where replicas train
torchtune      ``iteration_5/rank0_memory_snapshot.pickle``
Axolotl        ``snapshot.pickle``
SGLang         ``1764200000.5-TP-0-memory-DECODE.pickle``
=============  =======================================================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePath

__all__ = ["ROLES", "DumpName", "dump_name"]

#: A word of a path and the role it stands for.
ROLES = {
    "actor": "actor", "policy": "actor", "critic": "critic", "ref": "reference", "reference": "reference",
    "rollout": "rollout", "reward": "reward", "teacher": "teacher",
}  # fmt: skip

_RANK = re.compile(r"(?:^|[^a-z])rank[-_ .]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TP = re.compile(r"-TP-(\d{1,6})(?!\d)")
_RANK_STEP = re.compile(r"(\d{6})_step_(\d{1,12})")
_STEP = re.compile(r"(?:^|[-_])(?:step|iteration|iter)[-_]?(\d{1,12})(_exit)?(?=[-_.]|$)", re.IGNORECASE)
_PID = re.compile(r"pid[-_]?(\d{1,10})(?!\d)", re.IGNORECASE)
_UNIX = re.compile(r"(?:^|time)(1\d{9}(?:\.\d{1,7})?)(?=[-_])")
_WRITTEN = re.compile(r"(20\d{6})-(\d{4}(?:\d{2})?)(?!\d)")
_REPLICA = re.compile(r"replica[-_]?\d{1,6}", re.IGNORECASE)
_STAGE = re.compile(r"-memory-([A-Z]{3,20})")
_TAG = re.compile(r"oom_(\w{1,40}?)_rank\d")
_SAYS_MEMORY = re.compile(r"snapshot|memory|(?:^|[^a-z])(?:mem|oom)(?:[^a-z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class DumpName:
    """What a path says; None where it does not.

    ``time`` is ``2026-01-12 10:33:05`` (UTC where the name has seconds since 1970, else as the framework wrote it);
    ``label`` is what else tells two dumps of one rank apart; ``out_of_memory`` that the framework wrote it for that.
    """

    rank: int | None = None
    step: int | None = None
    role: str | None = None
    pid: int | None = None
    time: str | None = None
    label: str | None = None
    out_of_memory: bool = False


def dump_name(path: PurePath) -> DumpName | None:
    """Read a path relative to the folder that was given; None where nothing says that it is a memory snapshot."""
    name, folders = path.name, path.parts[:-1]
    both = _RANK_STEP.search(name)
    rank = both or _RANK.search(name) or _TP.search(name)
    if rank is None and _SAYS_MEMORY.search(name) is None:
        return None
    steps = [match for part in (*folders, name) for match in _STEP.finditer(part)]
    pid = _PID.search(name)
    return DumpName(
        rank=int(rank.group(1)) if rank else None,
        step=int(both.group(2)) if both else int(steps[0].group(1)) if steps else None,
        role=_role(path),
        pid=int(pid.group(1)) if pid else None,
        time=_time(path),
        label=_label(path),
        out_of_memory=name.lower().startswith("oom") or any(match.group(2) for match in steps),
    )


def _role(path: PurePath) -> str | None:
    words = [word for part in path.parts for word in re.split(r"[^a-z]+", part.lower())]
    found = next((ROLES[word] for word in words if word in ROLES), None)
    return "rollout" if found is None and _TP.search(path.name) else found


def _time(path: PurePath) -> str | None:
    if (unix := _UNIX.search(path.name)) is not None:
        return datetime.fromtimestamp(float(unix.group(1)), timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    for part in reversed(path.parts):
        if (written := _WRITTEN.search(part)) is not None:
            day, clock = written.groups()
            hours = ":".join(clock[i : i + 2] for i in range(0, len(clock), 2))
            return f"{day[:4]}-{day[4:6]}-{day[6:]} {hours}"
    return None


def _label(path: PurePath) -> str | None:
    replica = next((part for part in path.parts[:-1] if _REPLICA.fullmatch(part)), None)
    stage, tag = _STAGE.search(path.name), _TAG.match(path.name)
    return replica or (stage.group(1).lower() if stage else None) or (tag.group(1) if tag else None)
