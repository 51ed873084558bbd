"""What each technique of the lean trainer brings: alone over TRL's step, and last, when all others are there.

    python -m benchmarks.lean_techniques [--group 8B] [--again] [--json benchmarks/results/cpu/lean_techniques.json]

``alone`` is TRL's way with one technique; ``last`` the lean trainer without it. All rows are simulated whole steps:
``training`` and ``whole`` are peaks of allocated bytes without and with generation, FLOPs are training's
(``benchmarks.lean_flops``). "Our step, nothing on" is the lean trainer with everything switched off: what TRL's row and
it differ by is what the switches do not cover.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.lean_flops import counting, total
from benchmarks.lean_memory import HEADLINE, LONG_PROMPT, QWEN, simulated, training_bytes
from benchmarks.measure import environment

#: The lean trainer with every technique off: one piece of the whole micro-batch, layers checkpointed as TRL does.
OFF: dict[str, Any] = {
    "max_tokens_per_piece": 1 << 20,
    "fused_loss": False,
    "checkpointing": "full",
    "tiled_mlp": 0,
    "generation_batch": 8,
    "prefix_sharing": False,
}
#: And with all of them on, as the defaults have it on a 24 GB card at the headline's length.
ON: dict[str, Any] = {
    "max_tokens_per_piece": 2048,
    "fused_loss": True,
    "checkpointing": "offloaded",
    "tiled_mlp": 4096,
    "generation_batch": 2,
    "prefix_sharing": False,
}
SWITCHES = {
    "micro-splitting": "max_tokens_per_piece",
    "fused loss": "fused_loss",
    "offloaded checkpoints": "checkpointing",
    "tiled MLP": "tiled_mlp",
    "generation in parts": "generation_batch",
}


def lean(case: Mapping[str, Any], switches: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case of the lean trainer and what its config is told."""
    given = dict(switches)
    of_settings = {name: given[name] for name in ("generation_batch", "prefix_sharing")}
    return {**case, "recipe": "lean", **of_settings}, given


Row = tuple[dict[str, Any], "dict[str, Any] | None"]


def headline() -> dict[str, Row]:
    """8B LoRA, 8 x 20480: by name, a case and what the lean trainer's config is told."""
    rows: dict[str, Row] = {"TRL": (HEADLINE, None), "lean": lean(HEADLINE, ON)}
    for name, switch in SWITCHES.items():
        rows[f"last: {name}"] = lean(HEADLINE, {**ON, switch: OFF[switch]})
        rows[f"alone: {name}"] = lean(HEADLINE, {**OFF, switch: ON[switch]})
    return {
        **rows,
        "our step, nothing on": lean(HEADLINE, OFF),
        "alone: NF4 base": ({**HEADLINE, "load_in_4bit": True}, None),
        "last: NF4 base": lean({**HEADLINE, "load_in_4bit": True}, ON),
        "alone: bf16 base": ({**HEADLINE, "dtype": "float32"}, None),
        "last: bf16 base": lean({**HEADLINE, "dtype": "float32"}, ON),
    }


def long_prompt() -> dict[str, Row]:
    """7B LoRA, a prompt of 16,384 tokens and eight answers of 1024."""
    on = {**ON, "generation_batch": 8, "tiled_mlp": 0, "checkpointing": "full"}  # what the defaults come to here
    return {
        "TRL": (LONG_PROMPT, None),
        "our step, nothing on": lean(LONG_PROMPT, OFF),
        "lean": lean(LONG_PROMPT, {**on, "prefix_sharing": True}),
        "alone: shared prompt": lean(LONG_PROMPT, {**OFF, "prefix_sharing": True}),
        "last: shared prompt": lean(LONG_PROMPT, on),
    }


def reference() -> dict[str, Row]:
    """1.5B in full with 8-bit Adam and a reference policy, 8 x (256 + 786)."""
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
    """Bytes and FLOPs of one row."""
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
@click.option("--json", "path", type=click.Path(path_type=Path), default="benchmarks/results/cpu/lean_techniques.json")
def main(groups: tuple[str, ...], again: bool, path: Path) -> None:
    known = json.loads(path.read_text(encoding="utf-8"))["groups"] if path.is_file() else {}
    for group in groups or GROUPS:
        rows = known.setdefault(group, {})
        for name, (case, told) in GROUPS[group]().items():
            kept = rows.get(name, {})
            if again or kept.get("settings") != case or kept.get("lean") != told:
                rows[name] = measured(case, told)
            row = rows[name]
            print(f"{group}, {name}: training {row['training_bytes'] / 2**30:.2f} GiB, whole "
                  f"{row['whole_bytes'] / 2**30:.2f}, {row['flops'] / 1e15:.2f} PFLOP", flush=True)  # fmt: skip
            path.write_text(
                json.dumps({"groups": known, "environment": environment()}, indent=2) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
