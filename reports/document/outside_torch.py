"""List non-PyTorch memory on the device, and switches between rollout and training."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.blocks import Column, Fact, TableBlock, TableRow, TextCell, table
from memprof.reports.document.text import phase_label, sentence_list, size

from memprof.report.run import NonTorchMemory, Switch


def outside_facts(outside: NonTorchMemory | None) -> tuple[Fact, ...]:
    """List the facts; none if no driver was asked."""
    if outside is None:
        return ()
    whole = outside.capacity_bytes
    of = f", of {size(whole)} of {'the slice (MIG)' if outside.mig else 'the device'}" if whole else ""
    known = [f"{p.pid}: {size(p.bytes) if p.bytes is not None else 'not told'}" for p in outside.processes[:6]]
    named = f"by process id, {sentence_list(known)}" if known else "there are none"
    context = "CUDA's context, loaded modules, libraries' handles; made when the device is first used"
    apart = f"outside torch: {_beside(outside)}; the driver does not tell them apart"
    unlisted = "the driver's own reserve, or processes it does not list"
    rows = (
        ("Highest use", outside.highest_used_bytes, f"by all processes{of}"),
        ("This process", outside.own_bytes, "torch's reserved memory and the two lines below"),
        ("Before recording", outside.at_start_bytes, f"outside torch: {context}"),
        ("Since then", outside.grown_bytes, apart),
        ("Estimated", outside.estimated_bytes, _estimated(outside)),
        ("Other processes", outside.others_bytes, named),
        ("Not claimed by any process", outside.unnamed_bytes, unlisted),
    )
    facts = tuple(Fact(label, size(n), note, n) for label, n, note in rows if n is not None)
    return (Fact("Not known", outside.reason), *facts) if outside.reason else facts


def _beside(outside: NonTorchMemory) -> str:
    """Name what is known to allocate in the process without torch."""
    groups, most = outside.process_groups, outside.group_at_most_bytes
    each = f", on average at most {size(most)} each" if most is not None else ""
    found = [f"NCCL's communicators ({groups} process group{'s' if groups != 1 else ''}{each})"] if groups else []
    return sentence_list([*found, *outside.allocators, "modules loaded later, cuBLAS and cuDNN handles"])


def _estimated(outside: NonTorchMemory) -> str:
    """Say whose contexts are counted and what is not in the figure."""
    untold = sum(process.bytes is None for process in outside.processes)
    whose = ["this process"] if outside.highest_bytes is None else []
    whose += [f"{untold} other process{'es' if untold != 1 else ''}"] if untold else []
    beyond = f"; not in it: {_beside(outside)}" if outside.highest_bytes is None else ""
    return f"not measured: a CUDA context of usual size for {sentence_list(whose)}{beyond}"


# A run switches once a step: the newest are enough to see a pattern, and what does not come back.
_MOST_SWITCHES = 40
_COLUMNS = (
    "After", Column("Step", right=True), Column("torch counts", right=True), Column("Given back", right=True),
    Column("Resident", right=True), Column("Device, all processes", right=True),
)  # fmt: skip


def switches_table(switches: Sequence[Switch]) -> TableBlock | None:
    """List what torch counts and what is resident after the newest switches between rollout and training, in order."""
    return table(_COLUMNS, [_switch(switch) for switch in switches[-_MOST_SWITCHES:]], "switches")


def _switch(switch: Switch) -> TableRow:
    name = TextCell(phase_label(switch.phase), phase=switch.phase)
    counted = switch.allocated_bytes if switch.reserved_bytes is None else switch.reserved_bytes
    step = "–" if switch.step is None else str(switch.step)
    return TableRow((name, step, counted, switch.unmapped_bytes, switch.resident_bytes, switch.device_used_bytes))
