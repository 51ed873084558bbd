"""Draw the plan of a serving engine for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from memprof.reports.document.text import thousands

from memprof.units import format_bytes

__all__ = ["render_serving", "serving_rows"]


def serving_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return each figure of a plan: its name, its value, what it means."""
    share = plan["gpu_memory_utilization"]
    pool = f"{thousands(plan['kv_tokens'])} tokens of {thousands(plan['kv_bytes_per_token'])} B"
    return [
        ("gpu_memory_utilization", "none" if share is None else f"{share:.2f}", "the engine's share of the card"),
        ("max_model_len", f"{thousands(plan['max_model_len'])}", "tokens of the longest sequence"),
        ("max_num_seqs", f"{thousands(plan['max_num_seqs'])}", "sequences at full length at once"),
        ("weights", format_bytes(plan["weights_bytes"]), "of the engine's own copy"),
        ("activations", format_bytes(plan["activation_bytes"]), "of the forward that vLLM profiles"),
        ("outside", format_bytes(plan["outside_bytes"]), "CUDA context, kernels, workspaces"),
        ("KV pool", format_bytes(plan["kv_bytes"]), pool),
        ("trainer", format_bytes(plan["trainer_bytes"]), "what it holds when the engine starts"),
        ("card", format_bytes(plan["total_bytes"]), plan["gpu"]),
    ]


def render_serving(plan: Mapping[str, Any], width: int = 80, colour: bool = False) -> str:
    """Render the settings, what the share holds, and notes."""
    lines = [f"{plan['model']}: vLLM beside the trainer (modelled)", ""]
    lines += [f"  {name:<24}{value:>12}  {meaning}" for name, value, meaning in serving_rows(plan)]
    lines.append("")
    for note in plan["notes"]:
        lines += textwrap.wrap(f"Note: {note}", max(40, min(width, 100) - 1), subsequent_indent="  ")
    return "\n".join(lines) + "\n"
