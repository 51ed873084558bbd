"""Describe the lines of a run's counters files (``memprof.counters/1``): one file per rank, one line per step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from memprof.report.base import Bytes, Model, Positive, Rank, known

_M = TypeVar("_M", bound=Model)
#: A size in bytes; ``None`` or missing if not known.
Size = Bytes | UnsetType | None


class CountersStart(Model, tag_field="schema", tag="memprof.counters/1", frozen=True, kw_only=True):
    """The first line of a counters file: what is known of the run when it starts.

    Attributes:
        rank: number of the process.
        run_id: the same in all files of the run.
        started: when the run began, in Unix seconds.
        model_name: name of the model.
        parameters: number of its parameters.
        dtype: of its first parameter.
        device: name of the device.
        device_total_bytes: its memory.
        world_size: number of processes.
        max_steps: number of steps that the run is to have.
    """

    rank: Rank | UnsetType = UNSET
    run_id: str | UnsetType | None = UNSET
    started: Positive | UnsetType | None = UNSET
    model_name: str | UnsetType | None = UNSET
    parameters: int | UnsetType | None = UNSET
    dtype: str | UnsetType | None = UNSET
    device: str | UnsetType | None = UNSET
    device_total_bytes: Size = UNSET
    world_size: int | UnsetType | None = UNSET
    max_steps: int | UnsetType | None = UNSET


class StepCounters(Model, frozen=True, kw_only=True):
    """A line of a counters file: one step, or several that are merged. States are those at the end of the last step.

    Attributes:
        step: the last step.
        time: when it ended, in Unix seconds.
        recorded: whether allocations were recorded.
        host_rss: resident memory of the process.
        host_rss_peak: its highest value since the process started.
        host_pinned: pinned host memory.
        host_anon: private memory.
        host_files: mapped files.
        host_shared: shared memory (``/dev/shm``).
        host_children: resident memory of child processes.
        host_arenas: memory that malloc caches; part of ``host_anon``.
        peak_allocated: highest allocated memory since the previous line.
        peak_reserved: highest reserved memory since the previous line.
        allocated: allocated memory.
        reserved: reserved memory.
        inactive_split: free parts of used segments.
        cached: free segments.
        non_torch: non-PyTorch memory of the process.
        phases: highest allocated memory of each phase since the previous line.
    """

    step: int
    time: Positive | UnsetType | None = UNSET
    recorded: bool | UnsetType = UNSET
    host_rss: Size = UNSET
    host_rss_peak: Size = UNSET
    host_pinned: Size = UNSET
    host_anon: Size = UNSET
    host_files: Size = UNSET
    host_shared: Size = UNSET
    host_children: Size = UNSET
    host_arenas: Size = UNSET
    peak_allocated: Size = UNSET
    peak_reserved: Size = UNSET
    allocated: Size = UNSET
    reserved: Size = UNSET
    inactive_split: Size = UNSET
    cached: Size = UNSET
    non_torch: Size = UNSET
    phases: Mapping[str, Bytes] | UnsetType = UNSET

    def size(self, name: str) -> int | None:
        """Return one of the sizes by its name, ``None`` if it is not known."""
        value: int | UnsetType | None = getattr(self, name)
        return known(value)


class RecordedPeak(Model, frozen=True, kw_only=True):
    """A line of a counters file: the peak of a recording that was analysed.

    Attributes:
        step: the step of the peak.
        phase: its phase.
        peak_allocated: allocated memory.
        time: when the line was written, in Unix seconds.
        categories: bytes of each category at the peak, zeros left out.
        groups: bytes of each group at the peak, zeros left out.
    """

    step: int | UnsetType | None = UNSET
    phase: str | UnsetType | None = UNSET
    peak_allocated: Size = UNSET
    time: Positive | UnsetType | None = UNSET
    categories: Mapping[str, Bytes]
    groups: Mapping[str, Bytes] | UnsetType = UNSET


class TrainingEnd(Model, frozen=True, kw_only=True):
    """The last line of a counters file: training is over.

    Attributes:
        ended: when, in Unix seconds.
        step: the last step.
        error: whether an error ended it.
    """

    ended: Positive | UnsetType | None = UNSET
    step: int | UnsetType | None = UNSET
    error: bool | UnsetType | None = UNSET


Line = CountersStart | StepCounters | RecordedPeak | TrainingEnd
#: The classes of the lines.
LINES = (CountersStart, StepCounters, RecordedPeak, TrainingEnd)


def read_line(line: bytes) -> Line | None:
    """Read a line, without the fields and the entries of tables that are not as declared; ``None`` for other lines."""
    try:
        plain = msgspec.json.decode(line) if line.endswith(b"\n") else None
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    if plain.get("schema") == CountersStart.__struct_config__.tag:
        return _of_fields(plain, CountersStart)
    if "schema" in plain:
        return None
    if "ended" in plain:
        return _of_fields(plain, TrainingEnd)
    if isinstance(plain.get("categories"), dict):
        return _of_fields(plain, RecordedPeak)
    return _of_fields(plain, StepCounters)


def _of_fields(plain: dict[str, object], kind: type[_M]) -> _M | None:
    found: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        value = plain.get(field.name, UNSET)
        if isinstance(value, dict):
            value = {name: size for name, size in value.items() if type(size) is int and 0 <= size < 1 << 63}
        if value is not UNSET:
            with suppress(msgspec.ValidationError):
                found[field.name] = msgspec.convert(value, field.type)
    tag = {} if kind.__struct_config__.tag is None else {"schema": kind.__struct_config__.tag}
    try:
        return msgspec.convert({**tag, **found}, kind)
    except msgspec.ValidationError:  # a field that every such line has
        return None
