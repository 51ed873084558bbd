"""Read a snapshot file into columns.

Every layout that torch has written since 2.0 is understood; see ``docs/snapshot-format.md``. The plain
data is converted one device at a time, so that millions of dicts do not stay in memory beside the columns.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memprof._native import scanner
from memprof.errors import InputError
from memprof.foreign import RawRecord, SnapshotFile
from memprof.snapshot.columns import Interner, collector_paused, read_segments, read_trace
from memprof.snapshot.model import Blocks, Segments, Snapshot, Trace
from memprof.snapshot.rows import EventRows, scan_file
from memprof.snapshot.validation import read_annotations, read_run, read_settings
from memprof.text import clean_text

# Bytes of memory for each byte of an unpacked file, by the reader: measured on 1 and 5 million events, 1.1 to 1.4 with
# the native scanner and 3.6 without. Packed snapshots are 15 to 18 times smaller than unpacked ones.
_SCANNED, _IN_PYTHON, _PACKED = 2, 4, 20
_PACKED_NAMES = (".gz", ".xz", ".zst")


def memory_to_report(path: Path, n_bytes: int) -> int:
    """Estimate the memory in which a file of ``n_bytes`` is read and reported, without the process itself.

    A file that the native scanner leaves to the Python reader needs up to twice as much.
    """
    times = _IN_PYTHON if scanner() is None else _SCANNED
    return n_bytes * times * (_PACKED if path.name.endswith(_PACKED_NAMES) else 1)


def load_snapshot(path: str | os.PathLike[str], number: int | None = None) -> Snapshot:
    """Read a torch memory snapshot, at a path or a URL: a pickle or JSON, packed with gzip, xz or zstd or not;
    also a page of ``torch.cuda._memory_viz`` and a dictionary that ``torch.save`` wrote.

    ``number`` chooses among the snapshots of a file that has several: pickles one after another, or a list, a tuple or
    a dictionary of snapshots. The first is 1.

    Nothing in the file is executed: a pickle that names a global is refused. The Python reader takes what the native
    scanner leaves, and words every error.

    Raises:
        UnsafePickle: the pickle tries to load code.
        InputError: the file cannot be used; the message tells what is wrong and what to do.
        UsageError: the URL is not valid, or the package that opens it is missing.
    """
    file = path_of(path)
    with collector_paused():  # one collection over all the dicts would cost more than reading them
        scanned = scan_file(file)
        if scanned is not None and number in (None, 1):
            with suppress(Exception):
                return snapshot_from_raw(scanned[0], path=str(file), rows=scanned[1])
        from memprof.snapshot.unpickle import read_shared

        raw, stacks = read_shared(file)
        raw = _chosen(raw, str(file), number)
        return snapshot_from_raw(raw, path=str(file), consume=True, stacks=stacks)


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return the path that was given; of a URL one of :mod:`memprof.snapshot.remote`, which is loaded for it only."""
    if isinstance(path, Path) or "://" not in os.fspath(path):
        return Path(path)
    from memprof.snapshot.remote import place_of

    return place_of(path)


def _chosen(raw: Any, name: str, number: int | None) -> Any:
    """Return the snapshot to read of a file's data.

    Raises:
        InputError: there are several and none was chosen, or fewer than ``number``.
    """
    found = _several(raw) or [raw]
    if number is None and len(found) > 1:
        raise InputError(
            f"{name}: contains {len(found)} snapshots; choose one with memprof report --snapshot N "
            "(in Python: memprof.load_snapshot(path, number=N))."
        )
    if not 1 <= (number or 1) <= len(found):
        raise InputError(f"{name}: has no snapshot {number}; it contains {len(found)}.")
    return found[(number or 1) - 1]


def _several(raw: Any) -> list[Any]:
    """Return the snapshots in a list, a tuple or a dictionary of snapshots; none for anything else."""
    if isinstance(raw, dict):
        inner = [] if "segments" in raw or "device_traces" in raw else list(raw.values())
    else:
        inner = list(raw) if isinstance(raw, (list, tuple)) else []
    whole = all(isinstance(part, dict) and ("segments" in part or "device_traces" in part) for part in inner)
    return inner if whole else []


def snapshot_from_raw(
    raw: Any,
    path: str | None = None,
    *,
    consume: bool = False,
    stacks: Sequence[Any] = (),
    rows: EventRows | None = None,
) -> Snapshot:
    """Convert the result of ``torch.cuda.memory._snapshot()`` to columns.

    ``consume`` empties ``raw`` while it is read, which halves the memory needed. ``stacks`` are the lists of frames
    that stand in ``raw`` as their positions. With ``rows`` each trace in ``raw`` is the ``(begin, end)`` of its rows.

    Raises:
        InputError: ``raw`` is not a memory snapshot.
    """
    name = path or "the snapshot"
    try:
        with collector_paused():
            return _from_raw(raw, path, name, consume, stacks, rows)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = clean_text(str(error), 80).replace("\n", " ")
        raise InputError(
            f"{name}: not a memory snapshot, a field in it is missing or is not what torch writes "
            f"({type(error).__name__}: {reason})."
        ) from None


def _from_raw(
    raw: Any, path: str | None, name: str, consume: bool, stacks: Sequence[Any], rows: EventRows | None
) -> Snapshot:
    if isinstance(raw, list):
        raw = {"segments": raw, "device_traces": []}
    if not isinstance(raw, dict) or not ("segments" in raw or "device_traces" in raw):
        raise InputError(
            f"{name}: not a memory snapshot (no segments or device_traces in it); "
            "expected what torch.cuda.memory._dump_snapshot writes."
        )
    raw_segments, raw_traces = raw.get("segments", []), raw.get("device_traces", [])
    if not isinstance(raw_segments, list) or not isinstance(raw_traces, list):
        raise InputError(f"{name}: not a memory snapshot (segments and device_traces must be lists).")
    notes: list[str] = []
    run = read_run(raw.get("memprof"), notes)
    settings = read_settings(raw.get("allocator_settings"), notes)
    annotations = read_annotations(raw.get("external_annotations"), notes)
    last = rows.last_event(raw_traces) if rows else _last_event(raw_traces)
    version = _guess_version(raw, raw_segments, last)
    interner = Interner(stacks)
    segments: dict[int, Segments] = {}
    blocks: dict[int, Blocks] = {}
    for device, part in _by_device(raw_segments, name).items():
        segments[device], blocks[device] = read_segments(part, interner)
    traces: dict[int, Trace] = {}
    for device in range(len(raw_traces)):
        events = raw_traces[device]
        if rows is not None:
            if len(events := rows.of(events)):
                traces[device] = events.trace(interner, device, notes)
            continue
        if consume:
            raw_traces[device] = None
        if not isinstance(events, list):
            raise InputError(f"{name}: not a memory snapshot (the trace of device {device} is not a list).")
        if events:
            traces[device] = read_trace(events, interner, device, notes)
        del events
    return Snapshot(
        path=path,
        kind=run.kind,
        torch=run.versions.get("torch") or version,
        traces=traces,
        segments=segments,
        blocks=blocks,
        stacks=interner.stack_table(),
        pools=interner.pools,
        metadata=interner.metadata,
        settings=settings,
        annotations=annotations,
        run=run,
        notes=notes,
    )


def _by_device(raw_segments: list[Any], name: str) -> dict[int, list[RawRecord]]:
    parts: dict[int, list[RawRecord]] = {}
    for segment in raw_segments:
        if not isinstance(segment, dict) or not isinstance(segment.get("address", 0), int):
            raise InputError(f"{name}: not a memory snapshot (a segment in it is not a record).")
        device = segment.get("device", 0)
        if type(device) is not int or not 0 <= device < 4096:
            raise InputError(f"{name}: not a memory snapshot (a segment names device {device!r:.40}).")
        parts.setdefault(device, []).append(segment)
    return parts


def _last_event(traces: list[Any]) -> RawRecord:
    return next((t[-1] for t in traces if isinstance(t, list) and t and isinstance(t[-1], dict)), {})


def _guess_version(raw: SnapshotFile, segments: list[Any], event: Container[str]) -> str:
    """Guess the torch release from the keys it introduced: a version, a range, or "" where no key tells.

    ``event`` is the newest event, or its keys.
    """
    if "user_metadata" in event:
        return ">=2.10"
    if "compile_context" in event:
        return "2.8-2.9"
    if "external_annotations" in raw:
        return "2.5-2.7"
    if "allocator_settings" in raw:
        return "2.3-2.4"
    if "time_us" in event:
        return "2.2"
    block = next((b for s in segments if isinstance(s, dict) for b in s.get("blocks") or ()), None)
    if not isinstance(block, dict):
        return ""
    return "2.0" if "address" not in block else "2.1" if event else ">=2.1"
