"""Make large snapshots and measure what reading them costs.

``generate`` replays the trace of a recorded snapshot until it has as many events as wanted: after
each round the allocator is brought back to where the round began, so the result is a consistent
history of one long run, with the recorded stacks. ``measure`` reports CPU seconds and peak memory
of memprof and of PyTorch's own viewer on the same files, each in a fresh process.

    python -m benchmarks.reading large-files generate run.pickle --events 1000000 -o big.pickle
    python -m benchmarks.reading large-files measure big.pickle [...] --peer
    python -m benchmarks.reading large-files all run.pickle            # 10k, 100k, 1M and 3M events
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot

SIZES = (10_000, 100_000, 1_000_000, 3_000_000)

Event = dict[str, Any]


def replay(raw: dict[str, Any], events: int) -> dict[str, Any]:
    """Repeat the trace of ``raw``'s busiest device to at least ``events`` events."""
    traces = raw["device_traces"]
    device = max(range(len(traces)), key=lambda d: len(traces[d]))
    trace = [e for e in traces[device] if e["action"] not in ("oom", "snapshot")]
    if events < len(trace):  # the newest ones, as from a ring buffer
        return {**raw, "device_traces": [trace[-events:] if d == device else t for d, t in enumerate(traces)]}
    back = _way_back(trace)
    first, last = trace[0].get("time_us", 0), trace[-1].get("time_us", 0)
    period = last - first + len(back) + 1
    out: list[Event] = []
    offset = 0
    while len(out) + len(trace) < events:
        out.extend(_shifted(trace, offset))
        out.extend({**e, "time_us": last + offset + i} for i, e in enumerate(back, 1))
        offset += period
    out.extend(_shifted(trace, offset))
    return {**raw, "device_traces": [out if d == device else t for d, t in enumerate(traces)]}


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
        seen = table[address]
        # Begins and ends with the same kind: the address changed hands over the round.
        if seen[0]["action"] == seen[-1]["action"]:
            undo = [{**seen[-1], "action": action} for action in opposite[seen[-1]["action"]]]
            (gained if undo[0]["action"] in ("alloc", "segment_alloc") else back).extend(undo)
    gained.sort(key=lambda e: e["action"], reverse=True)  # segments before the blocks in them
    return back + gained


def measure(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return CPU seconds, wall seconds and peak resident bytes.

    Raises:
        RuntimeError: the command failed; its error output is in the message.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
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
from memprof.timeline import build_timeline
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
    save_snapshot(replay(read_plain(source), events), out)


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
    """Generate files of 10k to 3M events and measure each."""
    files = [folder / f"events-{n}.pickle" for n in SIZES]
    for count, file in zip(SIZES, files, strict=True):
        if not file.exists():
            save_snapshot(replay(read_plain(source), count), file)
    report(files, peer)
