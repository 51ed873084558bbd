"""Sort the dumps of a folder: choose those to show together, and write a row of the report for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from memprof.analysis.ranks.dump_names import ROLES
from memprof.analysis.ranks.files import RecordingFile, not_read
from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.ranks import Recording as ListedRecording
from memprof.vocabulary import Category, Phase

_MOST_STRANGERS = 5
_TRAINS = (Category.OPTIMIZER_STATE, Category.GRADIENTS, Category.ACTIVATION_GRADIENTS)
_SERVES = (Category.KV_CACHE, Category.INFERENCE_ENGINE)
# A role, and where it is known from.
_Role = tuple[str | None, Literal["name", "recording", "content"] | None]
# The role that a report shows first, where a run has several.
_FIRST = ("actor", "critic", "reference", "reward", "teacher", "rollout")


class DumpGroup:
    """Hold the recordings to show together, and what is known of the step's others.

    Attributes:
        shown: one of each rank, all of one role.
        roles: the role of each recording that was read, and how it is known.
        reports: the report of each that was read.
        refused: why each of the others could not be read.
        from_json: those that were read from a report's JSON.
        notes: what the reader should know.
    """

    def __init__(self, shown: Sequence[RecordingFile]) -> None:
        self.shown = list(shown)
        self.roles: dict[Path, _Role] = {}
        self.reports: dict[Path, Report] = {}
        self.refused: dict[Path, str] = {}
        self.from_json: set[Path] = set()
        self.notes: list[str] = []

    def add(self, recording: RecordingFile, report: Report | None, why: str) -> None:
        """Add a recording that was read: its report, or why there is none."""
        if report is None:
            self.refused[recording.path] = why
        else:
            self.reports[recording.path] = report
            self.roles[recording.path] = _role_of(recording, report)


def sort_dumps(
    group: DumpGroup, read_into: Callable[[DumpGroup, Sequence[RecordingFile]], None], role: str | None
) -> None:
    """Keep one recording of each rank in ``group.shown``, all of one role, and read those.

    All of the step are read only where their paths do not name their roles.

    ``read_into`` adds recordings to the group; ``role`` is that which trains where none is given.

    Raises:
        UsageError: none is of that role.
    """
    candidates = group.shown
    if role is None and not _several_of_a_rank(candidates):
        read_into(group, candidates)
        group.shown = [r for r in candidates if r.path in group.reports]
        return
    named = all(r.role is not None for r in candidates)
    if not named:
        read_into(group, candidates)
    while True:
        usable = [r for r in candidates if r.path not in group.refused]
        if not usable:
            group.shown = []
            return
        roles = {r.path: r.role if named else group.roles[r.path][0] for r in usable}
        wanted = _pick_role(roles.values(), role)
        group.shown = _newest_of_each_rank(r for r in usable if roles[r.path] == wanted)
        known = len(group.refused)
        read_into(group, group.shown)
        if len(group.refused) == known:
            break
    if wanted is not None and any(how == "content" for _, how in group.roles.values()):
        group.notes.append(
            f"The paths do not say which dump is of which role: {wanted} is the role of those shown, by their contents."
        )


# ---- of one step by role, and of one role the newest of each rank ----------------------------------------------------


def _role_of(recording: RecordingFile, report: Report) -> _Role:
    """Return what a process was for and how that is known: ``name``, ``recording`` or ``content``; None where it isn't.

    A dump with gradients or optimizer state trains; one that computes reference log-probabilities and does not is the
    reference; one with keys and values and neither is the rollout.
    """
    if recording.role is not None:
        return recording.role, "name"
    said = (report.source.config or {}).get("role")
    if isinstance(said, str) and said:
        return ROLES.get(said, said), "recording"
    own, phases = report.own_peaks, {span.phase for span in report.phases}
    if any(own.get(category) for category in _TRAINS):
        return ("critic" if own.get(Category.VALUE_MODEL) else "actor"), "content"
    if Phase.REFERENCE_LOGPROBS in phases:
        return "reference", "content"
    if any(own.get(category) for category in _SERVES):
        return "rollout", "content"
    return None, None


def _several_of_a_rank(recordings: Sequence[RecordingFile]) -> bool:
    """Tell whether two recordings are of one rank, or paths name several roles."""
    ranks = [recording.rank for recording in recordings]
    return len(set(ranks)) < len(ranks) or len({recording.role for recording in recordings}) > 1


def _pick_role(roles: Iterable[str | None], wanted: str | None) -> str | None:
    """Choose the role to show: ``wanted``, else the actor, the critic, ...; None where no dump tells its role.

    Raises:
        UsageError: no dump is of the wanted role.
    """
    there = [role for role in roles if role is not None]
    if wanted is not None:
        role = ROLES.get(wanted.lower(), wanted.lower())
        if role not in there:
            known = ", ".join(sorted(set(there))) or "none that is known"
            raise UsageError(f"--role {wanted}: not recorded in that step; there are dumps of {known}.")
        return role
    return min(there, key=lambda role: (_FIRST.index(role) if role in _FIRST else len(_FIRST), role), default=None)


def _newest_of_each_rank(recordings: Iterable[RecordingFile]) -> list[RecordingFile]:
    """Return the newest recording of each rank by the time or count in its path, else the time of its file."""
    newest: dict[int | None, RecordingFile] = {}
    for recording in recordings:
        known = newest.get(recording.rank)
        if known is None or _age(recording) > _age(known):
            newest[recording.rank] = recording
    return sorted(newest.values(), key=lambda r: r.rank or 0)


def _age(recording: RecordingFile) -> tuple[str, int, int, int, str]:
    written = recording.path.stat().st_mtime_ns
    return recording.time or "", recording.count or 0, written, recording.pid or 0, str(recording.path)


# ---- rows of the report ----------------------------------------------------------------------------------------------


def dump_rows(folder: Path, found: Sequence[RecordingFile], group: DumpGroup) -> list[ListedRecording]:
    """Return a row for every recording in the folder: what its path says, its peak if read, why it is not shown."""
    shown = {recording.path for recording in group.shown}
    strangers, links = not_read(folder, found)
    if strangers:
        group.notes.append(
            f"Not read, for nothing in the name says that it is a memory snapshot: {_first_of(strangers)}."
        )
    if links:
        group.notes.append(f"Not read, for links are not followed: {_first_of(links)}.")
    steps = {recording.step for recording in group.shown}
    rows = []
    for recording in found:
        role, how = group.roles.get(recording.path) or _named(recording)
        rows.append(
            ListedRecording(
                file=recording.path.relative_to(folder).as_posix(),
                rank=recording.rank,
                step=recording.step,
                role=role,
                role_from=how,
                pid=recording.pid,
                time=recording.time,
                label=recording.label,
                out_of_memory=recording.out_of_memory,
                shown=recording.path in shown,
                peak_bytes=group.reports[recording.path].peak.active_bytes if recording.path in group.reports else None,
                because=None if recording.path in shown else _because(recording, role, steps, group),
            )
        )
    return rows


def _first_of(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _MOST_STRANGERS} more" if len(paths) > _MOST_STRANGERS else ""
    return f"{', '.join(map(str, paths[:_MOST_STRANGERS]))}{more}"


def _named(recording: RecordingFile) -> _Role:
    return recording.role, "name" if recording.role else None


def _because(recording: RecordingFile, role: str | None, steps: set[int | None], group: DumpGroup) -> str:
    """Say why a recording is not shown, and how to show it."""
    if (why := group.refused.get(recording.path)) is not None:
        why = why.removeprefix(f"{recording.path}: ")
        return why if why.startswith("cannot be read") else f"cannot be read: {why}"
    if recording.step not in steps:
        return "no step in its path" if recording.step is None else f"another step (--step {recording.step})"
    same_role = {group.roles.get(r.path, (r.role, None))[0] for r in group.shown} == {role}
    if not same_role:
        return f"another role (--role {role})" if role else "its role is not known; report the file alone"
    return "an earlier or parallel dump of the same rank; report the file alone"
