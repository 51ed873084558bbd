"""Time simulations in CPU seconds, here and in another checkout, side by side: one after the other, each in a process.

    python -m benchmarks.simulator speed [--beside CHECKOUT] [--only NAME]... [--times N]
    python -m benchmarks.simulator speed --depths      # models of 2 to 126 layers, with and without the depth shortcut

CPU time of the whole command, imports and other processes included, so that a busy machine disturbs it little. Of
several runs the least is printed. A plan starts with nothing in its cache, and runs only where ``--only`` names it: it
takes minutes. ``--depths`` keeps ``benchmarks/results/cpu/depths.json`` and draws ``docs/images/depths.svg``.
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

from benchmarks.measure import write_result
from benchmarks.tabling import RESULTS, ROOT
from memprof.config.catalogue import find_config

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
@click.option("--depths", is_flag=True, help="Time models of Llama 3.1 8B's width by their number of layers.")
def main(beside: Path | None, only: tuple[str, ...], times: int, depths: bool) -> None:
    if depths:
        found = {number: {kind: _of_depth(number, off) for kind, off in _KINDS.items()} for number in _DEPTHS}
        write_result({"layers": found}, RESULTS / "depths.json")
        (ROOT / "docs" / "images" / "depths.svg").write_text(_drawn(found), encoding="utf-8")
        return
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


_DEPTHS = (2, 16, 32, 80, 126)
#: What is drawn, and the shortcuts that it is run without.
_KINDS: dict[str, list[str]] = {"derived from shallow models": [], "executed": ["depth"]}
_OF_DEPTH = """
import json, resource, sys
model, off = json.loads(sys.argv[1])
from memprof.simulate import fast_start, shortcut_switches as switches
fast_start.take_process()
from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.simulate.run import simulate_settings
settings = Settings(model=model, dtype="bfloat16", lora_r=16)
with switches.without(*off):
    highest = simulate_settings(settings, gpu=find_gpu("H100"), growth=False, stacks=False)["memprof"]["highest"]
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_s": round(used.ru_utime + used.ru_stime, 1), **highest}))
"""


def _of_depth(layers: int, off: list[str]) -> dict[str, Any]:
    """Simulate LoRA of a Llama with so many layers, as a plan does; return CPU seconds and peaks."""
    with tempfile.TemporaryDirectory() as folder:
        config = {**find_config("meta-llama/Llama-3.1-8B-Instruct"), "num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _OF_DEPTH, json.dumps([folder, off])], capture_output=True,
            text=True, check=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(layers, off, found, flush=True)
    return found


_WIDE, _HIGH, _LEFT, _BELOW = 560, 260, 46, 34


def _drawn(found: dict[int, dict[str, dict[str, Any]]]) -> str:
    """Draw CPU seconds over the number of layers; SystemExit where the two kinds differ in a peak."""
    for layers, kinds in found.items():
        if len({(row["allocated_bytes"], row["reserved_bytes"]) for row in kinds.values()}) > 1:
            raise SystemExit(f"{layers} layers: peaks differ: {kinds}")
    most = max(row["cpu_s"] for kinds in found.values() for row in kinds.values())
    top = -(-most // 10) * 10

    def place(layers: float, seconds: float) -> tuple[float, float]:
        wide = _WIDE - _LEFT - 160
        return _LEFT + wide * layers / max(found), _HIGH - _BELOW - (_HIGH - _BELOW - 16) * seconds / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="#fff"/>',
    ]
    for seconds in range(0, int(top) + 1, max(10, int(top) // 50 * 10)):
        x, y = place(0, seconds)
        parts.append(f'<path d="M{x:.0f} {y:.1f}H{place(max(found), 0)[0]:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{seconds}</text>')
    for layers in found:
        x, y = place(layers, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{layers}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HIGH - 4}">layers; CPU seconds, imports included</text>')
    for kind, colour in zip(_KINDS, ("#1f77b4", "#d62728"), strict=True):
        points = [place(layers, kinds[kind]["cpu_s"]) for layers, kinds in found.items()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{kind}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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
