"""Memory of the lean trainer beside TRL's, simulated: the published headline, small cards, long contexts.

    python -m benchmarks.lean_memory [CASE ...] [--json benchmarks/results/cpu/lean_memory.json]

Each case is one simulated run (half a minute to three minutes of CPU time); results that the file already has are kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import environment

_LLAMA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16", "lora_r": 16, "prompt_length": 512}
_QWEN = {"model": "Qwen/Qwen2.5-1.5B-Instruct", "dtype": "bfloat16", "prompt_length": 256, "completion_length": 786}
_HEADLINE = {**_LLAMA, "completion_length": 19_968}

CASES: dict[str, dict[str, Any]] = {
    "8B LoRA, 8 x 20480, TRL's defaults": _HEADLINE,
    "8B LoRA, 8 x 20480, TRL tuned by hand": {
        **_HEADLINE, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
    },
    "8B LoRA, 8 x 20480, lean": {**_HEADLINE, "recipe": "lean", "generation_batch": 2},
    "8B QLoRA, 8 x 20480, lean": {**_HEADLINE, "recipe": "lean", "generation_batch": 2, "load_in_4bit": True},
    "8B QLoRA, 8 x 65536, lean": {
        **_LLAMA, "completion_length": 65_024, "recipe": "lean", "generation_batch": 1, "load_in_4bit": True,
        "tiled_mlp": 8192,
    },
    "8B LoRA, 8 x 262144, training alone, lean": {
        **_LLAMA, "completion_length": 261_632, "recipe": "lean", "generation": "none", "tiled_mlp": 16_384,
    },
    "8B LoRA, 8 x 262144, training alone, lean, expandable segments": {
        **_LLAMA, "completion_length": 261_632, "recipe": "lean", "generation": "none", "tiled_mlp": 16_384,
        "alloc_conf": "expandable_segments:True",
    },
    "1.5B QLoRA, 8 x 1042, lean": {**_QWEN, "lora_r": 16, "load_in_4bit": True, "recipe": "lean"},
    "1.5B full, 8-bit Adam, reference, 8 x 1042, lean": {
        **_QWEN, "recipe": "lean", "optim": "adamw_torch_8bit", "beta": 0.04,
    },
}  # fmt: skip


def simulated(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one case: both peaks, each phase's, the host's pinned memory; CPU seconds of simulating it."""
    from memprof import analyze
    from memprof.simulate.run import simulate_settings
    from memprof.simulate.settings import Settings
    from memprof.snapshot.reader import snapshot_from_raw

    start = time.process_time()
    raw = simulate_settings(Settings(**settings), stacks=False)
    seconds = time.process_time() - start
    report = analyze(snapshot_from_raw(raw)).to_dict()
    phases: dict[str, int] = {}
    for phase in report["phases"]:
        phases[phase["phase"]] = max(phases.get(phase["phase"], 0), phase["peak_bytes"])
    return {
        "settings": settings,
        "allocated_bytes": report["peak"]["allocated_bytes"],
        "phase": report["peak"]["phase"],
        "reserved_bytes": report["device_peak"]["reserved_bytes"],
        "phases": phases,
        "own_peaks": {name: size for name, size in report["own_peaks"].items() if size},
        "pinned_bytes": report["host"]["pinned_bytes"],
        "cpu_seconds": round(seconds, 1),
    }


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)), metavar="[CASE]...")
@click.option("--json", "path", type=click.Path(path_type=Path), default="benchmarks/results/cpu/lean_memory.json")
def main(names: tuple[str, ...], path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    for name in names or CASES:
        if known.get(name, {}).get("settings") != CASES[name]:
            known[name] = simulated(CASES[name])
        row = known[name]
        gib = {key: row[f"{key}_bytes"] / 2**30 for key in ("allocated", "reserved", "pinned")}
        print(f"{name}: {gib['allocated']:.2f} GiB allocated ({row['phase']}), {gib['reserved']:.2f} reserved, "
              f"{gib['pinned']:.1f} pinned on the host")  # fmt: skip
        ordered = {case: known[case] for case in CASES if case in known}
        path.write_text(json.dumps({"cases": ordered, "environment": environment()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
