"""Time simulations in CPU seconds, here and in another checkout, side by side: one after the other, each in a process.

    python -m benchmarks.simulator speed [--beside CHECKOUT] [--only NAME]... [--times N]

A process's own CPU time, the import of torch and TRL included, so that a busy machine disturbs it little. Of several
runs the least is printed. A plan's is that of all its processes, with nothing in its cache. A plan runs only where
``--only`` names it: it takes minutes.
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

__all__ = ["main"]

_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_LONG = {"dtype": "bfloat16", "lora_r": 16, "prompt_length": 512, "completion_length": 19_968}
_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "0.5B, full, 64 + 192 tokens": (
        {"model": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16", "prompt_length": 64, "completion_length": 192},
        "H100",
    ),
    "8B, LoRA, 8 × 20480 tokens": ({"model": _LLAMA, **_LONG}, "H100"),
    "8B, lean, LoRA, 2 × 20480 tokens": (
        {"model": _LLAMA, "recipe": "lean", "per_device_train_batch_size": 2, "num_generations": 2, **_LONG},
        "RTX 4090",
    ),
}
_PLANS: dict[str, tuple[str, ...]] = {
    "plan of a 0.5B on 8 GiB": ("--model", "Qwen/Qwen2.5-0.5B-Instruct", "--gpu", "8GiB"),
    "plan of a 7B on an RTX 4090": ("--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "4090"),
}
# Runs in either checkout, so it asks for nothing that only one of them has.
_CHILD = """
import json, sys, time
from memprof.simulate.fit import run_row
settings, gpu = json.loads(sys.stdin.read())
from memprof.config.settings import Settings
row = run_row(Settings(**settings).to_dict(), gpu)
print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": row["peak_bytes"], "fits": row["fits"]}))
"""


_PLANNING = """
import json, resource, subprocess, sys
given = [sys.executable, "-W", "ignore", "-m", "memprof", "plan", *json.loads(sys.stdin.read()), "--json", "-"]
done = subprocess.run(given, capture_output=True, text=True)
used, best = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(done.stdout)["best"]
largest = {n: best["config"][n] for n in ("per_device_train_batch_size", "completion_length")} if best else None
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "best": best and [best["method"], largest]}))
"""


@click.command(help=__doc__)
@click.option("--beside", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout.")
@click.option("--only", multiple=True, help="A case's name; may be given more than once.")
@click.option("--times", default=1, show_default=True)
def main(beside: Path | None, only: tuple[str, ...], times: int) -> None:
    for name, (settings, gpu) in _CASES.items():
        if only and name not in only:
            continue
        places = [place for place in (beside, ROOT) if place is not None]
        found = [min((_timed(place, settings, gpu) for _ in range(times)), key=_seconds) for place in places]
        ratio = f"  {_seconds(found[0]) / _seconds(found[-1]):.2f} times as fast" if beside else ""
        print(f"{name}: {' -> '.join(f'{_seconds(row):.1f}' for row in found)} CPU s{ratio}", flush=True)
    for name, given in _PLANS.items():
        if name in only:  # minutes each
            for place in (place for place in (beside, ROOT) if place is not None):
                row = _planned(place, given)
                told = f"{_seconds(row):.1f} CPU s, {row['rows']} simulated, best {row['best']}"
                print(f"{name}, {place.name}: {told}", flush=True)


def _planned(place: Path, given: tuple[str, ...]) -> dict[str, Any]:
    """Make a plan with an empty cache; ``rows`` counts the settings that were simulated."""
    with tempfile.TemporaryDirectory() as cache:
        answer = _asked(place, _PLANNING, list(given), {"MEMPROF_CACHE": cache})
        kept = [json.loads(path.read_text(encoding="utf-8")) for path in Path(cache).glob("*.json")]
    plain = [{name: value for name, value in row.items() if name != "largest"} for row in kept]
    return {**answer, "rows": len({json.dumps(row, sort_keys=True) for row in plain})}


def _seconds(row: dict[str, Any]) -> float:
    return float(row["cpu_s"])


def _timed(place: Path, settings: dict[str, Any], gpu: str) -> dict[str, Any]:
    return _asked(place, _CHILD, [settings, gpu], {})


def _asked(place: Path, child: str, question: Any, more: dict[str, str]) -> dict[str, Any]:
    """Run ``child`` on a checkout's code and return the JSON of its last line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(place), **more}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child], input=json.dumps(question), capture_output=True,
        text=True, cwd=place, env=env, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
