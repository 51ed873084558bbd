"""Simulate a deep model by three shallow ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memprof.allocator.model import AllocatorOutOfMemory
from memprof.config.settings import Settings
from memprof.foreign import SnapshotFile
from memprof.recording.run_facts import plain_config
from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.shortcuts.depth.derivation import ProgramGrowth, fit
from memprof.simulate.shortcuts.depth.layers import Depths, depths_of, with_layers
from memprof.simulate.shortcuts.depth.program import Frames, ProgramLog, play
from memprof.simulate.shortcuts.depth.stream import Keys, NotAffine, stream_of

_PLAIN_NAME = re.compile(r"all-linear|[A-Za-z_][\w-]*")

Train = Callable[[FakeSession], None]
#: Simulates a model of this config with this capacity; the function trains it, or stands for that.
Execute = Callable[[Any, "int | None", "Callable[[FakeSession, Train], None]"], SnapshotFile]
Work = dict[tuple["int | None", str], Tally]


@dataclass(frozen=True)
class _Shallow:
    """What one shallow simulation leaves."""

    log: ProgramLog
    session: FakeSession
    stacks: list[Frames | None]


@dataclass(frozen=True)
class _Derived:
    """What the program of a deep model follows from, its work and its notes."""

    growth: ProgramGrowth
    repeats: int
    work: Work
    notes: list[str]


_derived: dict[str, _Derived | None] = {}


def simulated_by_depth(
    settings: Settings,
    config: Any,
    execute: Execute,
    capacity: int | None,
    *,
    growth: bool,
    by_name: bool,
    key: tuple[Any, ...],
) -> SnapshotFile | None:
    """Simulate by shallow models; None where the run has to be executed in full, which the caller then does.

    Args:
        settings: of the run.
        config: of its model.
        execute: simulates the same run of a model of another config.
        capacity: bytes the device has for this process.
        growth, by_name: as in :func:`memprof.simulate.run.simulate_settings`.
        key: what else the shallow simulations depend on.
    """
    loads = by_name or settings.load_in_4bit  # which asks how much of the device is free
    if (loads and capacity is not None) or not _may_be(settings, growth) or (depths := depths_of(config)) is None:
        return None
    given = [settings.to_dict(), growth, by_name, *map(str, key), config.to_json_string(use_diff=False)]
    known = json.dumps(given, sort_keys=True, default=str)
    if known not in _derived:
        _derived.clear()
        try:
            shallow = [_simulated(config, execute, layers) for layers in depths.shallow]
            _derived[known] = _derive(shallow, depths)
        except NotAffine:
            _derived[known] = None
    found = _derived[known]
    try:
        return None if found is None else _played(found, config, execute, capacity)
    except NotAffine:
        return None


def _may_be(settings: Settings, growth: bool) -> bool:
    """Tell whether nothing in these settings depends on the whole depth.

    The lean trainer and vLLM choose by the size of the model, loading a second model asks what the first has left free,
    DDP and ZeRO fill buckets across layers, and all steps of a generation are played on the allocator's model.
    """
    is_sharded = settings.gpus > 1 and settings.sharding == "fsdp2"
    generates = settings.generation == "hf" and growth and not is_sharded  # all tokens
    names = [*(settings.lora_target_modules or ()), *(settings.modules_to_save or ())]
    plain = all(_PLAIN_NAME.fullmatch(name) for name in names)
    second = settings.reward_model is not None or (settings.beta and not settings.has_adapter)
    others = generates or second or settings.lean or settings.images or settings.generation == "vllm"
    return (settings.gpus == 1 or is_sharded) and plain and settings.device == "cuda" and not others


def _simulated(config: Any, execute: Execute, layers: int) -> _Shallow:
    found: list[tuple[ProgramLog, FakeSession]] = []

    def train(session: FakeSession, run: Train) -> None:
        found.append((ProgramLog(session), session))
        run(session)

    raw = execute(with_layers(config, layers), None, train)
    ((log, session),) = found
    stacks = [event["frames"] for event in raw["device_traces"][0] if event["action"] == "alloc"]
    host = session.fake_recorder.storages.host
    if host.held or host.requested_peak or session.managed_bytes or session.host_bytes:
        raise NotAffine("memory of the host is in use")
    if log.refused or raw["memprof"]["oom"] is not None or len(stacks) != log.allocations:
        raise NotAffine(log.refused or "not every allocation is in the log")
    return _Shallow(log, session, stacks)


def _derive(shallow: list[_Shallow], depths: Depths) -> _Derived:
    notes = [one.session.notes for one in shallow]
    if notes[0] != notes[1] or notes[0] != notes[2]:
        raise NotAffine("the notes differ")
    keys = Keys()
    streams = [stream_of(one.log.entries, one.stacks, keys) for one in shallow]
    growth: ProgramGrowth = fit(streams, keys, depths.shallow, depths.period)
    first, second, third = (one.session.fake_recorder.work.phases for one in shallow)
    if not first.keys() == second.keys() == third.keys():
        raise NotAffine("the phases that compute differ")
    work = {phase: _tally(first[phase], second[phase], third[phase], depths.repeats) for phase in first}
    return _Derived(growth, depths.repeats, work, notes[0])


def _tally(first: Tally, second: Tally, third: Tally, repeats: int) -> Tally:
    """Return a phase's work ``repeats`` steps of depth after the first."""
    parts = zip((first.kernels, first.fused), (second.kernels, second.fused), (third.kernels, third.fused), strict=True)
    kernels, fused = (_counts(*part, repeats) for part in parts)
    return Tally(kernels, fused, _affine(first.host_bytes, second.host_bytes, third.host_bytes, repeats))


_Counts = dict[tuple[int, int, int], float]


def _counts(first: _Counts, second: _Counts, third: _Counts, repeats: int) -> _Counts:
    everywhere = first.keys() & second.keys() & third.keys()
    found = {key: _affine(first[key], second[key], third[key], repeats) for key in first if key in everywhere}
    # What is computed over all layers at once: the same kernels, of sizes that grow.
    left = [sorted(set(counts) - everywhere) for counts in (first, second, third)]
    if not len(left[0]) == len(left[1]) == len(left[2]):
        raise NotAffine("a kernel is launched at one depth alone")
    for a, b, c in zip(*left, strict=True):
        size: Any = tuple(int(_affine(*values, repeats)) for values in zip(a, b, c, strict=True))
        found[size] = found.get(size, 0.0) + _affine(first[a], second[b], third[c], repeats)
    return found


def _affine(first: float, second: float, third: float, repeats: int) -> float:
    if not math.isclose(third - second, second - first, rel_tol=1e-9, abs_tol=1e-6):
        raise NotAffine("work does not grow evenly")
    return first + repeats * (second - first)


def _played(derived: _Derived, config: Any, execute: Execute, capacity: int | None) -> SnapshotFile | None:
    is_full = False
    program = derived.growth.program(derived.repeats)

    def train(session: FakeSession, _: Train) -> None:
        nonlocal is_full
        session.setup = {"model_config": plain_config(config)}
        session.notes[:] = derived.notes
        try:
            play(session, program)
        except AllocatorOutOfMemory:
            is_full = True
            raise
        session.fake_recorder.work.phases = derived.work

    raw = execute(config, capacity, train)
    return None if is_full else raw
