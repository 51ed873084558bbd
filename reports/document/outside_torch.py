"""Fill what lies on the device beside torch's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.reports.document.blocks import Fact, Line, Table, Words, table
from memprof.reports.document.text import phase_label, plain, sentence_list, size


def outside_facts(outside: Mapping[str, Any] | None) -> tuple[Fact, ...]:
    """List the facts; none where no driver was asked."""
    if not outside:
        return ()
    capacity, others = outside["capacity_bytes"], outside["processes"]
    of = f", of {size(capacity)} of {'the slice (MIG)' if outside['mig'] else 'the device'}" if capacity else ""
    known = [f"{p['pid']}: {size(p['bytes']) if p['bytes'] is not None else 'not told'}" for p in others[:6]]
    named = f"by process id, {sentence_list(known)}" if others else "there are none"
    context = "CUDA's context, loaded modules, libraries' handles; made when the device is first used"
    rows = (
        ("Highest use", "highest_used_bytes", f"by all processes{of}"),
        ("This process", "own_bytes", "torch's reserved memory and the two lines below"),
        ("Before recording", "at_start_bytes", f"outside torch: {context}"),
        ("Since then", "grown_bytes", f"outside torch: {_beside(outside)}; the driver does not tell them apart"),
        ("Estimated", "estimated_bytes", _estimated(outside)),
        ("Other processes", "others_bytes", plain(named)),
        ("Not claimed by any process", "unnamed_bytes", "the driver's own reserve, or processes it does not list"),
    )
    facts = [Fact(label, size(n), note, n) for label, key, note in rows if (n := outside.get(key)) is not None]
    return (*([Fact("Not known", plain(outside["reason"]))] if outside["reason"] else []), *facts)


def _beside(outside: Mapping[str, Any]) -> str:
    """Name what is known to allocate beside torch in the process."""
    groups, most = outside["process_groups"], outside.get("group_at_most_bytes")
    each = f", on average at most {size(most)} each" if most is not None else ""
    found = [f"NCCL's communicators ({groups} process group{'s' if groups != 1 else ''}{each})"] if groups else []
    found += [plain(a) for a in outside["allocators"]]
    return sentence_list([*found, "modules loaded later, cuBLAS and cuDNN handles"])


def _estimated(outside: Mapping[str, Any]) -> str:
    """Say whose contexts are counted and what is not in the figure."""
    untold = sum(p["bytes"] is None for p in outside["processes"])
    whose = ["this process"] if outside["highest_bytes"] is None else []
    whose += [f"{untold} other process{'es' if untold != 1 else ''}"] if untold else []
    beyond = f"; not in it: {_beside(outside)}" if outside["highest_bytes"] is None else ""
    return f"not measured: a CUDA context of usual size for {sentence_list(whose)}{beyond}"


# A run switches once a step: the newest are enough to see a pattern, and what does not come back.
_MOST_SWITCHES = 40


def switches_of(switches: Sequence[Mapping[str, Any]] | None) -> Table | None:
    """List what torch counts and what is resident after the newest switches between rollout and training, in order."""
    heads = "After|Step>|torch counts>|Given back>|Resident>|Device, all processes>"
    return table(heads, [_switch(s) for s in (switches or [])[-_MOST_SWITCHES:]], "switches")


def _switch(switch: Mapping[str, Any]) -> Line:
    name = Words(plain(phase_label(switch["phase"])), phase=plain(switch["phase"]))
    counted = switch["allocated_bytes"] if switch["reserved_bytes"] is None else switch["reserved_bytes"]
    step = "–" if switch["step"] is None else str(switch["step"])
    sizes = (switch["unmapped_bytes"], switch["resident_bytes"], switch["device_used_bytes"])
    return Line((name, step, counted, *sizes))
