"""Measure what each shortcut of the simulator saves: CPU seconds with all of them, and with all but one.

    python -m benchmarks.simulator shortcuts [--only WORKLOAD]... [--shortcut NAME]... [--pairs N] [--out FILE.json]

Each run is a process of its own, imports included. A workload is run without each shortcut that it takes; the runs of a
round follow one another, in turning order, so that a slow minute of the machine meets them all. A run is stopped after
``--limit`` CPU seconds and counts as those. Allocated and reserved peaks must be equal, or the command fails. A file of
results keeps the workloads that are not measured again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import interleaved, write_result
from benchmarks.tabling import ROOT, table
from memprof.simulate.shortcut_switches import SHORTCUTS

_LLAMA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512}
_SMALL = {"model": "Qwen/Qwen2.5-0.5B-Instruct"}
#: Settings by workload. One of a search leaves out what :func:`memprof.simulate.evaluate.run_row` does.
WORKLOADS: dict[str, dict[str, Any]] = {
    "0.5B, GRPO by default": _SMALL,
    "7B, SFT, LoRA": {
        "model": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "lora_r": 16, "trainer": "sft", "max_length": 2048,
        "generation": "none",
    },
    "8B, LoRA, 8 × 2,560 tokens": {**_LLAMA, "completion_length": 2048},
    "0.5B, 8,192 tokens generated": {**_SMALL, "dtype": "bfloat16", "completion_length": 8192},
    "0.5B, of a search": {**_SMALL, "dtype": "bfloat16", "gradient_accumulation_steps": 16},
    "0.5B, lean, LoRA, 2 × 20,480 tokens": {
        **_SMALL, "dtype": "bfloat16", "lora_r": 16, "recipe": "lean", "prompt_length": 512, "completion_length": 19968,
        "per_device_train_batch_size": 2, "num_generations": 2, "generation": "none",
    },
    "8B, LoRA, 8 × 20,480 tokens": {**_LLAMA, "completion_length": 19968},
    "30B-A3B, LoRA": {"model": "Qwen/Qwen3-30B-A3B", "dtype": "bfloat16", "lora_r": 16},
}  # fmt: skip
_CHILD = """
import json, resource, sys
settings, search, off, limit = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
from memprof.simulate import fast_start, shortcut_switches as switches
fast_start.take_process()
from memprof.config.gpus import gpu_of
from memprof.config.settings import Settings
from memprof.simulate.evaluate import evaluate
load, taken = switches.import_module, set()
switches.import_module = lambda name: taken.add(name) or load(name)
with switches.without(*off):
    told = evaluate(Settings(**settings), gpu_of("H100"), growth=not search, again=not search).raw["memprof"]
used = resource.getrusage(resource.RUSAGE_SELF)
names = [name for name, module in switches.SHORTCUTS.items() if any(path.endswith(f".{module}") for path in taken)]
highest = told["highest"]
print(json.dumps([used.ru_utime + used.ru_stime, highest["allocated_bytes"], highest["reserved_bytes"], names]))
"""
#: What else a shortcut is made of, beside its file.
_BEHIND = {"native": ("allocator/native.py", "_native/replay.c")}
_KEYS = ("cpu_s", "allocated_bytes", "reserved_bytes", "taken")


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(WORKLOADS)), metavar="WORKLOAD", help="As in the table.")
@click.option("--shortcut", "names", multiple=True, type=click.Choice(list(SHORTCUTS)), metavar="NAME", help="A name.")
@click.option("--pairs", default=1, show_default=True)
@click.option("--limit", default=120, show_default=True, help="CPU seconds of a run.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the result.")
def main(only: tuple[str, ...], names: tuple[str, ...], pairs: int, limit: int, out: Path | None) -> None:
    kept = json.loads(out.read_text(encoding="utf-8"))["workloads"] if out is not None and out.exists() else {}
    for workload in only or WORKLOADS:
        first = _timed(workload, [], limit)
        asked = [name for name in names or SHORTCUTS if name in first["taken"]]
        tasks = {"all": partial(_timed, workload, [], limit)}
        tasks |= {name: partial(_timed, workload, [name], limit) for name in asked}
        found = interleaved(tasks, pairs)
        peaks = {(row["allocated_bytes"], row["reserved_bytes"]) for told in found.values() for row in told
                 if "taken" in row}  # fmt: skip
        if len(peaks) > 1:
            raise SystemExit(f"{workload}: peaks differ: {sorted(peaks)}")
        kept[workload] = {"limit_s": limit, "cpu_s": {name: [r["cpu_s"] for r in told] for name, told in found.items()}}
        result = {"lines": _lines(), "workloads": {name: kept[name] for name in WORKLOADS if name in kept}}
        write_result(result, out)
        print(table_of(result), file=sys.stderr)


def _timed(workload: str, off: list[str], limit: int) -> dict[str, Any]:
    """Simulate in a process; return CPU seconds, peaks and shortcuts taken, and only ``limit`` where it was stopped."""
    asked = json.dumps([WORKLOADS[workload], "search" in workload, off, limit])
    given = [sys.executable, "-W", "ignore", "-c", _CHILD, asked]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return {"cpu_s": float(limit)}
    if done.returncode:
        raise SystemExit(f"{workload}, without {off}: {done.stderr[-2000:]}")
    return dict(zip(_KEYS, json.loads(done.stdout.splitlines()[-1]), strict=True))


def _lines() -> dict[str, int]:
    """Count the lines of each shortcut's file or folder, and of what stands behind it."""
    found = {}
    for name, module in SHORTCUTS.items():
        place = ROOT / "memprof" / "simulate" / "shortcuts" / module.partition(".")[0]
        files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        files += [ROOT / "memprof" / file for file in _BEHIND.get(name, ())]
        found[name] = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return found


def table_of(found: dict[str, Any]) -> str:
    """Show CPU seconds (medians) by workload and by the shortcut left out; ``> N``: stopped after N."""
    head = ("CPU seconds", "pairs", "all", *(f"without `{name}` ({n} lines)" for name, n in found["lines"].items()))
    rows: list[list[object]] = []
    for workload, told in found["workloads"].items():
        seconds, limit = told["cpu_s"], told["limit_s"]
        whole = statistics.median(seconds["all"])
        row: list[object] = [workload, len(seconds["all"]), f"{whole:.1f}"]
        for name in found["lines"]:
            without = statistics.median(seconds[name]) if name in seconds else None
            row.append("–" if without is None else f"> {limit}" if without >= limit
                       else f"{without:.1f} ({100 * (1 - whole / without):.0f}% saved)")  # fmt: skip
        rows.append(row)
    return table(head, rows)


if __name__ == "__main__":
    main()
