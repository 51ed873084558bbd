"""Make large snapshots and measure what reading them costs.

``generate`` replays the trace of a recorded snapshot until it has as many events as wanted: after
each round the allocator is brought back to where the round began, so the result is a consistent
history of one long run, with the recorded stacks. ``measure`` reports CPU seconds and peak memory
of memprof and of PyTorch's own viewer on the same files, each in a fresh process.

    python -m benchmarks.reading large-files generate run.pickle --events 1000000 -o big.pickle
    python -m benchmarks.reading large-files measure big.pickle [...] --peer
    python -m benchmarks.reading large-files all run.pickle            # 10k, 100k, 1M and 10M events
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from memprof.snapshot.opcodes import without_frames
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import PROTOCOL, save_snapshot

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)

Event = dict[str, Any]


def replay(raw: dict[str, Any], events: int) -> dict[str, Any]:
    """Repeat the trace of ``raw``'s busiest device to at least ``events`` events."""
    traces = raw["device_traces"]
    device = max(range(len(traces)), key=lambda d: len(traces[d]))
    trace = [e for e in traces[device] if e["action"] not in ("oom", "snapshot")]
    if events < len(trace):  # the newest ones, as from a ring buffer
        return {**raw, "device_traces": [trace[-events:] if d == device else t for d, t in enumerate(traces)]}
    rounds = range(_rounds(trace, events))
    out = [e for number in rounds for e in _round(trace, number)]
    out.extend(_shifted(trace, len(rounds) * _period(trace)))
    return {**raw, "device_traces": [out if d == device else t for d, t in enumerate(traces)]}


def write_replay(raw: dict[str, Any], events: int, out: Path) -> None:
    """Write what :func:`replay` returns in the memory of a few rounds, however many events it has.

    From the third on, a round's bytes are those of the second with other times and references to what is its own.
    """
    traces = raw["device_traces"]
    device = max(range(len(traces)), key=lambda d: len(traces[d]))
    trace = [e for e in traces[device] if e["action"] not in ("oom", "snapshot")]
    rounds, period = _rounds(trace, events), _period(trace)
    if rounds < 2 or any(traces[device + 1 :]) or not all(e.get("time_us", 0) >> 40 for e in trace):
        save_snapshot(replay(raw, events), out)
        return
    parts = _Parts()
    with out.open("wb") as file:
        file.write(b"\x80\x04}(")
        for key in [key for key in raw if key != "device_traces"]:
            file.write(parts.of(key) + parts.of(raw[key]))
        file.write(parts.of("device_traces") + b"](" + b"".join(map(parts.of, traces[:device])) + b"]")
        file.write(parts.batch(_round(trace, 0)))
        known, second = parts.count, _round(trace, 1)
        forth = parts.batch(second[: len(trace)])
        body = forth + parts.batch(second[len(trace) :])
        own, (references, times) = parts.count - known, parts.moving(body, known)
        for number in range(rounds):  # the second and all after it
            moved = np.frombuffer(body, np.uint8).copy()
            _add(moved, references, 4, number * own)
            _add(moved, times, 7, number * period)
            file.write(moved[: len(forth) if number == rounds - 1 else None].tobytes())
        file.write(b"".join(map(parts.of, traces[device + 1 :])) + b"eu.")


class _Parts:
    """Pickle objects one by one, all with the same memo."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, PROTOCOL)

    @property
    def count(self) -> int:
        """Return how many objects the memo has."""
        return len(self._memo())

    def of(self, given: Any) -> bytes:
        """Return an object's bytes, without what a file begins and ends with."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(given)
        return without_frames(self._buffer.getvalue(), "a part")[2:-1]

    def batch(self, events: Iterable[Event]) -> bytes:
        """Return the bytes that append events to a list."""
        return b"(" + b"".join(map(self.of, events)) + b"e"

    def moving(self, body: bytes, known: int) -> tuple[Any, Any]:
        """Find where ``body`` has references beyond ``known``, of 4 bytes, and times, of 7."""
        names = {place for place, given in self._memo().values() if isinstance(given, str) and given == "time_us"}
        references, times, is_time = [], [], False
        for opcode, value, at in pickletools.genops(body + b"."):
            if is_time:
                assert (opcode.name, body[at + 1]) == ("LONG1", 7), "a time of another width"
                times.append(at + 2)
            elif opcode.name == "LONG_BINGET" and value is not None and value >= known:
                references.append(at + 1)
            is_time = opcode.name in ("BINGET", "LONG_BINGET") and value in names
        return np.array(references, np.int64), np.array(times, np.int64)

    def _memo(self) -> dict[int, tuple[int, Any]]:
        memo: Any = self._pickler.memo  # of the C pickler; unknown to its types
        found: dict[int, tuple[int, Any]] = memo.copy()
        return found


def _add(body: Any, places: Any, width: int, number: int) -> None:
    """Add a number to the little-endian ones of ``width`` bytes at these places."""
    columns, shifts = places[:, None] + np.arange(width), np.arange(width, dtype=np.int64) * 8
    values = (body[columns].astype(np.int64) << shifts).sum(axis=1) + number
    body[columns] = (values[:, None] >> shifts & 0xFF).astype(np.uint8)


def _rounds(trace: list[Event], events: int) -> int:
    """Return how many rounds come before the last, which is not undone."""
    return -(-max(events - len(trace), 0) // (len(trace) + len(_way_back(trace))))


def _period(trace: list[Event]) -> int:
    return int(trace[-1].get("time_us", 0) - trace[0].get("time_us", 0) + len(_way_back(trace)) + 1)


def _round(trace: list[Event], number: int) -> list[Event]:
    """Return a round and what undoes it."""
    offset, last = number * _period(trace), trace[-1].get("time_us", 0)
    back = ({**e, "time_us": last + offset + i} for i, e in enumerate(_way_back(trace), 1))
    return [*_shifted(trace, offset), *back]


def _shifted(trace: list[Event], offset: int) -> Iterator[Event]:
    lists: dict[int, list[Any]] = {}
    for index, event in enumerate(trace):
        copy = {**event, "time_us": event.get("time_us", index) + offset}
        # torch makes these anew for every event; shared, they would make the file smaller than a real one.
        # A list of frames is one capture's: an event shares it with its twin, never with another round's.
        if "frames" in copy:
            copy["frames"] = lists.setdefault(id(copy["frames"]), list(copy["frames"]))
        if "pool_id" in copy:
            copy["pool_id"] = (copy["pool_id"][0], copy["pool_id"][1])
        if copy.get("compile_context"):
            copy["compile_context"] = "".join(list(copy["compile_context"]))
        yield copy


def _way_back(trace: list[Event]) -> list[Event]:
    """Return the events that undo a round: frees of what it left, allocs of what it took away."""
    opposite = {
        "alloc": ("free_requested", "free_completed"),
        "free_completed": ("alloc",),
        "segment_alloc": ("segment_free",),
        "segment_free": ("segment_alloc",),
    }
    blocks: dict[int, list[Event]] = {}
    segments: dict[int, list[Event]] = {}
    for event in trace:
        if event["action"] in opposite:
            table = segments if event["action"].startswith("segment") else blocks
            table.setdefault(event["addr"], []).append(event)
    back: list[Event] = []
    ordered = [(a, t) for t in (blocks, segments) for a in t]
    gained: list[Event] = []
    for address, table in ordered:
        first, last = table[address][0], table[address][-1]
        # What the round leaves goes; what it found comes back, though another of other size may have lain there since.
        left = last["action"] in ("alloc", "segment_alloc")
        found = first["action"] in ("free_completed", "segment_free")
        if left and found and first["size"] == last["size"]:
            continue
        if left:
            back.extend({**last, "action": action} for action in opposite[last["action"]])
        if found:
            gained.extend({**first, "action": action} for action in opposite[first["action"]])
    gained.sort(key=lambda e: e["action"], reverse=True)  # segments before the blocks in them
    return back + gained


def measure(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return CPU seconds, wall seconds and peak resident bytes.

    Raises:
        RuntimeError: the command failed; its error output is in the message.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        environment = {"MEMPROF_CACHE": "0", **os.environ}  # read anew each time
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)}: {errors.read()[-500:].decode(errors='replace')}")
    return usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024


_LOAD = """
import sys
from memprof.snapshot import load_snapshot
from memprof.timeline.timeline import build_timeline
build_timeline(load_snapshot(sys.argv[1]))
"""

_CLI = "from memprof.cli import main; main()"


def commands(file: Path, folder: Path, peer: bool) -> dict[str, list[str]]:
    """Return what is measured on a file, by name."""
    python = sys.executable
    table = {
        "floor (imports)": [python, "-c", "import memprof.snapshot, memprof.timeline"],
        "load + timeline": [python, "-c", _LOAD, str(file)],
        "report --json": [python, "-c", _CLI, "report", str(file), "--json", str(folder / "out.json")],
        "report, HTML": [python, "-c", _CLI, "report", str(file), "-o", str(folder / "out.html")],
    }
    if peer:
        viewer = [python, "-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o", str(folder / "viewer.html")]
        table["_memory_viz trace_plot"] = viewer
    return table


def report(files: Sequence[Path], peer: bool) -> None:
    """Print one line per file and command."""
    print(f"{'file':28} {'MB':>6} {'command':24} {'CPU s':>7} {'wall s':>7} {'RSS MB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            for name, command in commands(file, Path(folder), peer).items():
                try:
                    cpu, wall, peak = measure(command)
                except RuntimeError as error:
                    print(f"{file.name:28} {name}: failed: {str(error)[-160:]}")
                    continue
                size = file.stat().st_size / 1e6
                print(f"{file.name:28} {size:6.0f} {name:24} {cpu:7.2f} {wall:7.2f} {peak / 1e6:7.0f}", flush=True)


PEER = click.option("--peer", is_flag=True, help="Run PyTorch's viewer too (needs torch).")


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--events", type=int, required=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True)
def generate(source: Path, events: int, out: Path) -> None:
    """Write one large snapshot."""
    write_replay(read_plain(source), events, out)


@main.command("measure")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@PEER
def measure_files(files: tuple[Path, ...], peer: bool) -> None:
    """Measure files."""
    report(files, peer)


@main.command("all")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), default=Path("build/large"), show_default=True)
@PEER
def measure_all(source: Path, folder: Path, peer: bool) -> None:
    """Generate files of 10k to 10M events and measure each."""
    files = [folder / f"events-{n}.pickle" for n in SIZES]
    for count, file in zip(SIZES, files, strict=True):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_replay(read_plain(source), count, file)
    report(files, peer)
