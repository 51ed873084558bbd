"""Simulate what each technique of the lean trainer brings: alone over TRL's step, and last, with all others there.

    python -m benchmarks.lean techniques [--again] [--json benchmarks/results/cpu/lean_techniques.json]

``alone`` is TRL's way with one technique; ``last`` the lean trainer without it. Rows are simulated whole steps, but for
generation in parts, a phase of its own, whose two rows are put together from others. Of a step
``training`` and ``whole`` are peaks of allocated bytes without and with generation, FLOPs are training's
(``benchmarks.lean.flops``). "Our step, nothing on" is the lean trainer with everything switched off: what TRL's row and
it differ by is what the switches do not cover.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.lean.flops import counting, total
from benchmarks.lean.memory import HEADLINE, simulated, training_bytes
from benchmarks.measure import environment
from benchmarks.tabling import RESULTS

#: The lean trainer with every technique off: one piece of the whole micro-batch, layers checkpointed as TRL does.
OFF: dict[str, Any] = {
    "max_tokens_per_piece": 1 << 20,
    "checkpointing": "full",
    "tiled_mlp": 0,
    "generation_batch": 8,
    "prefix_sharing": False,
}
#: And with all of them on, as the defaults have it on a 24 GB GPU at the headline's length.
ON: dict[str, Any] = {
    "max_tokens_per_piece": 2048,
    "checkpointing": "offloaded",
    "tiled_mlp": 4096,
    "generation_batch": 2,
    "prefix_sharing": False,
}
SWITCHES = {
    "micro-splitting": "max_tokens_per_piece",
    "offloaded checkpoints": "checkpointing",
    "tiled MLP": "tiled_mlp",
}


def lean(case: Mapping[str, Any], switches: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a case of the lean trainer and what its config is told."""
    given = dict(switches)
    of_settings = {name: given[name] for name in ("generation_batch", "prefix_sharing")}
    return {**case, "recipe": "lean", **of_settings}, given


Row = tuple[dict[str, Any], "dict[str, Any] | None"]


def headline() -> dict[str, Row]:
    """Return the rows of 8B LoRA, 8 x 20480: by name, a case and what the lean trainer's config is told."""
    rows: dict[str, Row] = {"our step, nothing on": lean(HEADLINE, OFF)}
    for name, switch in SWITCHES.items():
        rows[f"last: {name}"] = lean(HEADLINE, {**ON, switch: OFF[switch]})
        rows[f"alone: {name}"] = lean(HEADLINE, {**OFF, switch: ON[switch]})
    return {
        **rows,
        "alone: NF4 base": ({**HEADLINE, "load_in_4bit": True}, None),
        "alone: bf16 base": ({**HEADLINE, "dtype": "float32"}, None),
        "last: bf16 base": lean({**HEADLINE, "dtype": "float32"}, ON),
    }


#: Rows that ``benchmarks.lean.memory`` has simulated: defaults on that GPU come to :data:`ON`.
SIMULATED = {
    "TRL": "8B LoRA, 8 x 20480, TRL's defaults",
    "lean": "8B LoRA, 8 x 20480, lean",
    "last: NF4 base": "8B QLoRA, 8 x 20480, lean, generating 2 together",
}


def simulated_before() -> dict[str, Any]:
    """Read those rows, as far as they are there."""
    cases = json.loads((RESULTS / "lean_memory.json").read_text(encoding="utf-8"))["cases"]
    return {
        name: {
            "kept_from": case,
            "training_bytes": training_bytes(cases[case]),
            "whole_bytes": cases[case]["allocated_bytes"],
            "phases": cases[case]["phases"],
            "flops": cases[case]["flops"],
        }
        for name, case in SIMULATED.items()
        if case in cases
    }


def put_together(rows: dict[str, Any]) -> None:
    """Make the rows of generation in parts: it is a phase of its own, so another row's stands in its place."""
    off, on = rows.get("our step, nothing on"), rows.get("lean")
    if off is None or on is None:
        return
    for name, training, generation in (("alone", off, on), ("last", on, off)):
        rows[f"{name}: generation in parts"] = {
            "training_bytes": training["training_bytes"],
            "whole_bytes": max(training["training_bytes"], generation["phases"]["generate"]),
            "flops": training["flops"],
            "put_together": True,
        }


def measured(case: Mapping[str, Any], told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Measure bytes and FLOPs of one row."""
    with counting() as flops:
        found = simulated(case, told, warmed_up=True)
    return {
        "settings": found["settings"],
        "lean": dict(told) if told else None,
        "training_bytes": training_bytes(found),
        "whole_bytes": found["allocated_bytes"],
        "phases": found["phases"],
        "flops": total(flops.last_step()),
        "cpu_seconds": found["cpu_seconds"],
    }


@click.command(help=__doc__)
@click.option("--again", is_flag=True, help="Simulate what the file already has, too.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_techniques.json")
def main(again: bool, path: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}
    rows |= simulated_before()
    for name, (case, told) in headline().items():
        before = rows.get(name, {})
        if again or before.get("settings") != case or before.get("lean") != told:
            rows[name] = measured(case, told)
        row = rows[name]
        print(f"{name}: training {row['training_bytes'] / 2**30:.2f} GiB, whole "
              f"{row['whole_bytes'] / 2**30:.2f}, {row['flops'] / 1e15:.2f} PFLOP", flush=True)  # fmt: skip
        put_together(rows)
        path.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=2) + "\n", encoding="utf-8")
