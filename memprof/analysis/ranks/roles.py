"""Tell the dumps of one step apart: by role, and of one role the newest of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memprof.analysis.ranks.dump_names import ROLES
from memprof.analysis.ranks.files import Recording
from memprof.errors import UsageError

_TRAINS = ("optimizer_state", "gradients", "activation_gradients")
_SERVES = ("kv_cache", "inference_engine")
# The role that a report shows first, where a run has several.
_FIRST = ("actor", "critic", "reference", "reward", "teacher", "rollout")


def role_of(recording: Recording, report: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return what a process was for and how that is known: ``name``, ``recording`` or ``content``; None where it isn't.

    A dump with gradients or optimizer state trains; one that computes reference log-probabilities and does not is the
    reference; one with keys and values and neither is the rollout.
    """
    if recording.role is not None:
        return recording.role, "name"
    said = (report["source"].get("config") or {}).get("role")
    if isinstance(said, str) and said:
        return ROLES.get(said, said), "recording"
    own, phases = report.get("own_peaks") or {}, {phase.get("phase") for phase in report.get("phases") or []}
    if any(own.get(category) for category in _TRAINS):
        return ("critic" if own.get("value_model") else "actor"), "content"
    if "reference_logprobs" in phases:
        return "reference", "content"
    if any(own.get(category) for category in _SERVES):
        return "rollout", "content"
    return None, None


def several_of_a_rank(recordings: Sequence[Recording]) -> bool:
    """Tell whether two recordings are of one rank, or paths name several roles."""
    ranks = [recording.rank for recording in recordings]
    return len(set(ranks)) < len(ranks) or len({recording.role for recording in recordings}) > 1


def pick_role(roles: Iterable[str | None], wanted: str | None) -> str | None:
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


def newest_of_each_rank(recordings: Iterable[Recording]) -> list[Recording]:
    """Return the newest recording of each rank by the time or count in its path, else the time of its file."""
    newest: dict[int | None, Recording] = {}
    for recording in recordings:
        known = newest.get(recording.rank)
        if known is None or _age(recording) > _age(known):
            newest[recording.rank] = recording
    return sorted(newest.values(), key=lambda r: r.rank or 0)


def _age(recording: Recording) -> tuple[str, int, int, int, str]:
    written = recording.path.stat().st_mtime_ns
    return recording.time or "", recording.count or 0, written, recording.pid or 0, str(recording.path)
