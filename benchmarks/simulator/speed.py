"""Time simulations in CPU seconds, here and in another checkout, side by side: one after the other, each in a process.

    python -m benchmarks.simulator speed [--beside CHECKOUT] [--only NAME]... [--times N]

CPU time of the whole command, imports and other processes included, so that a busy machine disturbs it little. Of
several runs the least is printed. A plan starts with nothing in its cache, and runs only where ``--only`` names it: it
takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.tabling import ROOT

_LONG = ("--lora-r", "16", "--prompt-length", "512", "--completion-length", "19968", "--dtype", "bfloat16")
_LLAMA = ("simulate", "--model", "meta-llama/Llama-3.1-8B-Instruct", *_LONG)
#: Command lines of memprof.
_CASES: dict[str, tuple[str, ...]] = {
    "0.5B, full, 64 + 192 tokens": (
        "simulate", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--dtype", "bfloat16", "--prompt-length", "64",
        "--completion-length", "192", "--gpu", "H100",
    ),
    "8B, LoRA, 8 × 20480 tokens": (*_LLAMA, "--gpu", "H100"),
    "8B, lean, LoRA, 2 × 20480 tokens": (
        *_LLAMA, "--recipe", "lean", "--per-device-train-batch-size", "2", "--num-generations", "2", "--gpu", "4090",
    ),
    "70B, full, FSDP2 × 64": (
        "simulate", "--model", "meta-llama/Llama-3.1-70B-Instruct", "--dtype", "bfloat16", "--gpus", "64",
        "--sharding", "fsdp2", "--gpu", "H100",
    ),
}  # fmt: skip
_PLANS: dict[str, tuple[str, ...]] = {
    "plan of a 0.5B on 8 GiB": ("plan", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--gpu", "8GiB"),
    "plan of a 7B on an RTX 4090": ("plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "4090"),
}
# Runs in either checkout, so it asks for nothing that only one of them has.
_CHILD = """
import json, resource, subprocess, sys
given = [sys.executable, "-W", "ignore", "-m", "memprof", *json.loads(sys.stdin.read()), "--json", "-"]
done = subprocess.run(given, capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
if done.returncode not in (0, 4):  # 4: it does not fit
    sys.exit(done.stderr)
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "answer": json.loads(done.stdout)}))
"""


@click.command(help=__doc__)
@click.option("--beside", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout.")
@click.option("--only", multiple=True, help="A case's name; may be given more than once.")
@click.option("--times", default=1, show_default=True)
def main(beside: Path | None, only: tuple[str, ...], times: int) -> None:
    places = [place for place in (beside, ROOT) if place is not None]
    for name, given in _CASES.items():
        if only and name not in only:
            continue
        found = [min((_timed(place, given) for _ in range(times)), key=_seconds) for place in places]
        ratio = f"  {_seconds(found[0]) / _seconds(found[-1]):.2f} times as fast" if beside else ""
        reserved = " -> ".join(f"{row['answer']['device_peak']['reserved_bytes']:,}" for row in found)
        seconds = " -> ".join(f"{_seconds(row):.1f}" for row in found)
        print(f"{name}: {seconds} CPU s{ratio}; reserved {reserved} bytes", flush=True)
    for name, given in _PLANS.items():
        if name in only:  # minutes each
            for place in places:
                with tempfile.TemporaryDirectory() as cache:
                    row, rows = _timed(place, given, MEMPROF_CACHE=cache), len(list(Path(cache).glob("*.json")))
                best = row["answer"]["best"]
                told = f"{best['method']}, {best['config']['completion_length']} tokens" if best else "none"
                print(f"{name}, {place.name}: {_seconds(row):.1f} CPU s, {rows} results, best {told}", flush=True)


def _seconds(row: dict[str, Any]) -> float:
    return float(row["cpu_s"])


def _timed(place: Path, given: tuple[str, ...], **more: str) -> dict[str, Any]:
    """Run a command on a checkout's code; return its CPU seconds, all its processes together, and its answer."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place), **more}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD], input=json.dumps(given), capture_output=True,
        text=True, cwd=place, env=env, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
