"""Take memory away from lean runs on the emulated device, and hold what they trained against runs that had room.

    python -m benchmarks.lean survival [--only NAME]... [--steps 30]
    python -m benchmarks.lean survival --table

A small Llama trains. The allocator's limit is lowered in the first step and from eight random operators of random
steps on, each time for up to a step, to 2, 5, 10 and 20% below what the run that had room allocated at its highest.
What ``on_oom="auto"`` makes of it: lived or ended in a sentence, losses and parameters beside those of the run
that had room, and CPU time over its. Both train on the same completions, since rounding alone would make later samples
others; that a generation which ran out sampled the same tokens is looked at in the first. What rounding alone makes of
smaller pieces is measured beside it in bf16. Rows are kept in
``benchmarks/results/emulated-cuda/survival.json``.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import click

from benchmarks.simulator.emulated.device import ask
from benchmarks.simulator.emulated.matrix import RESULTS, read_rows

SHORTAGES = (2, 5, 10, 20)
_LORA: dict[str, Any] = {"lora": {}}
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, shared prompt": {"settings": {"prefix_sharing": True}},
    "LoRA": _LORA,
    "LoRA, shared prompt": {**_LORA, "settings": {"prefix_sharing": True}},
    "LoRA with dropout": {"lora": {"lora_dropout": 0.1}},
    "QLoRA": {**_LORA, "four_bits": True, "settings": {"bf16": True}, "pieces": (512, 256)},
    "full, checkpointing": {"settings": {"gradient_checkpointing": True}},
    "full, selective checkpointing": {"settings": {"checkpointing": "selective"}},
    "full, offloaded checkpointing": {"settings": {"checkpointing": "offloaded"}},
    "full, two accumulated": {"settings": {"gradient_accumulation_steps": 2}},
    "full, two ranks": {"ranks": 2},
    "full, most memory in the optimizer's step": {
        "shortages": (*SHORTAGES, 25, 30),  # where the moments have no room beside a piece, and one alone has none
        "shape": {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 32768, "num_attention_heads": 4},
        "settings": {"max_tokens_per_piece": 64, "gradient_checkpointing": True, "generation_batch": 4,
                     "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8},
    },
    "full, most memory in generation": {
        "shape": {"head_dim": 512, "num_key_value_heads": 2, "intermediate_size": 64},
        "settings": {"max_tokens_per_piece": 128, "gradient_checkpointing": True},
    },
}


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(CASES)), metavar="NAME", help="A configuration.")
@click.option("--steps", default=30, show_default=True)
@click.option("--table", "shows", is_flag=True, help="Print the table of the rows that are kept.")
def main(only: tuple[str, ...], steps: int, shows: bool) -> None:
    for name in () if shows else only or CASES:
        question = {"settings": {}, "steps": steps, "shortages": SHORTAGES, **CASES[name]}
        found = ask(
            "benchmarks.lean.equality.survival_run", question, "24GiB", most=None, devices=question.get("ranks", 1)
        )
        _keep(name, {"steps": steps, **found})
        click.echo(f"{name}: {', '.join(_told(run) for run in found['runs'])}")
    click.echo(table())


def _keep(name: str, row: dict[str, Any]) -> None:
    rows = {**read_rows("survival"), name: row}
    ordered = {case: rows[case] for case in CASES if case in rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "survival.json").write_text(json.dumps({"rows": ordered}, indent=1) + "\n")


def _told(run: dict[str, Any]) -> str:
    return "lived" if run["lived"] else "sentence" if run["sentence"] else "DIED"


def table() -> str:
    """Sum up the rows that are kept, by base: what lived, and how far apart what was trained is."""
    rows = read_rows("survival")
    names = {"QLoRA": ["QLoRA"], "the others": [name for name in rows if name != "QLoRA"]}
    lines = ["| run | lived | pieces again | losses apart | parameters apart | CPU time |",
             "| --- | --: | --: | --: | --: | --: |"]  # fmt: skip
    for label, own in names.items():
        lines.append(_line(label, [run for name in own for run in rows[name]["runs"] if "pieces" not in run]))
    lines.append(_line("QLoRA with room, smaller pieces", [run for run in rows["QLoRA"]["runs"] if "pieces" in run]))
    ended = [
        f"*{name}* at {run['shortage']}%" + ("" if run["sentence"] else ", which died")
        for name, row in rows.items()
        for run in row["runs"]
        if not run["lived"]
    ]
    kinds: dict[str, list[str]] = {}
    for name in names["the others"]:
        base, _, rest = name.partition(" with " if " with " in name else ", ")
        kinds.setdefault(base, []).append(rest or "plain")
    tried = "; ".join(f"{base} ({', '.join(own)})" for base, own in kinds.items())
    text = f"The others: {tried}. Ended in a sentence: {', '.join(ended)} below."
    return "\n".join([*lines, "", *textwrap.wrap(text, 120)])


def _line(name: str, runs: list[dict[str, Any]]) -> str:
    lived = [run for run in runs if run["lived"]]
    cells: list[object] = [name, f"{len(lived)} of {len(runs)}", max(run["again"] for run in runs)]
    cells += [f"{max(run[key] for run in lived):.0e}" for key in ("losses_apart", "parameters_apart")]
    cost = [run["cost"] for run in lived]
    cells.append(f"{min(cost):.2f} to {max(cost):.2f}")
    return f"| {' | '.join(map(str, cells))} |"
