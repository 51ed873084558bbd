"""Simulate what each technique of the lean trainer brings: alone over TRL's step, and last, with all others there.

    python -m benchmarks.lean techniques [--group 8B] [--again] [--json benchmarks/results/cpu/lean_techniques.json]

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
from benchmarks.lean.memory import HEADLINE, LONG_PROMPT, QWEN, simulated, training_bytes
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
#: And with all of them on, as the defaults have it on a 24 GB card at the headline's length.
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


#: Rows that ``benchmarks.lean.memory`` has simulated: defaults on that card come to :data:`ON`.
KEPT = {
    "8B": {
        "TRL": "8B LoRA, 8 x 20480, TRL's defaults",
        "lean": "8B LoRA, 8 x 20480, lean",
        "last: NF4 base": "8B QLoRA, 8 x 20480, lean, generating 2 together",
    },
    "7B long prompt": {
        "TRL": "7B LoRA, 8 x (16384 + 1024), TRL's defaults",
        "lean": "7B LoRA, 8 x (16384 + 1024), lean, shared prompt",
        "last: shared prompt": "7B LoRA, 8 x (16384 + 1024), lean",
    },
}


def kept(group: str) -> dict[str, Any]:
    """Read those rows, as far as they are there."""
    cases = json.loads((RESULTS / "lean_memory.json").read_text(encoding="utf-8"))["cases"]
    found = {}
    for name, case in KEPT.get(group, {}).items():
        if case in cases:
            row = cases[case]
            found[name] = {
                "kept_from": case,
                "training_bytes": training_bytes(row),
                "whole_bytes": row["allocated_bytes"],
                "phases": row["phases"],
                "flops": row["flops"],
            }
    return found


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


def long_prompt() -> dict[str, Row]:
    """Return the rows of 7B LoRA, a prompt of 16,384 tokens and eight answers of 1024."""
    return {
        "our step, nothing on": lean(LONG_PROMPT, OFF),
        "alone: shared prompt": lean(LONG_PROMPT, {**OFF, "prefix_sharing": True}),
    }


def reference() -> dict[str, Row]:
    """Return the rows of 1.5B in full with 8-bit Adam and a reference policy, 8 x (256 + 786)."""
    case = {**QWEN, "optim": "adamw_torch_8bit", "beta": 0.04}
    off = {**OFF, "reference": "device"}
    on = {**ON, "reference": "host", "generation_batch": 8, "tiled_mlp": 0, "checkpointing": "full"}
    return {
        "TRL": (case, None),
        "our step, nothing on": lean(case, off),
        "lean": lean(case, on),
        "alone: reference on the host": lean(case, {**off, "reference": "host"}),
        "last: reference on the host": lean(case, {**on, "reference": "device"}),
    }


GROUPS = {"8B": headline, "7B long prompt": long_prompt, "1.5B reference": reference}


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
@click.option("--group", "groups", multiple=True, type=click.Choice(list(GROUPS)))
@click.option("--again", is_flag=True, help="Simulate what the file already has, too.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=RESULTS / "lean_techniques.json")
def main(groups: tuple[str, ...], again: bool, path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["groups"] if path.is_file() else {}
    for group in groups or GROUPS:
        rows = known.setdefault(group, {})
        rows |= kept(group)
        for name, (case, told) in GROUPS[group]().items():
            before = rows.get(name, {})
            if again or before.get("settings") != case or before.get("lean") != told:
                rows[name] = measured(case, told)
            row = rows[name]
            print(f"{group}, {name}: training {row['training_bytes'] / 2**30:.2f} GiB, whole "
                  f"{row['whole_bytes'] / 2**30:.2f}, {row['flops'] / 1e15:.2f} PFLOP", flush=True)  # fmt: skip
            if group == "8B":
                put_together(rows)
            path.write_text(
                json.dumps({"groups": known, "environment": environment()}, indent=2) + "\n", encoding="utf-8"
            )
