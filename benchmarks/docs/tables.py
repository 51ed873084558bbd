"""Put tables of measured figures into the documentation, between ``<!-- table: NAME -->`` and ``<!-- end -->``.

    python -m benchmarks.docs tables [--check]

The figures are those of ``benchmarks/results/*/*.json``, the forms of ``docs/oom.md`` those of the tests;
``--check`` (and a test) only compares. Nothing is simulated here.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import click
from memprof.reports.document.text import CATEGORY_WORDS

from benchmarks.faults.inject import injections_table
from benchmarks.faults.mutate import inputs_table
from benchmarks.lean import tables as lean_tables
from benchmarks.lean.equality import survival
from benchmarks.oom import forms_table
from benchmarks.simulator import classes, decisions, fields, rivals, shortcuts
from benchmarks.simulator.emulated import edges, matrix
from benchmarks.tabling import ROOT, read, table
from benchmarks.versions import cuda as cuda_versions
from examples import published_tables
from memprof.units import GIB
from memprof.vocabulary import CATEGORY_LABELS, Category

_FILLED = "accuracy glossary grpo-memory lean-trainer oom simulation-reference"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in _FILLED.split()),
    *(ROOT / name / "README.md" for name in ("benchmarks", "examples")),
    ROOT / "benchmarks" / "measurements.md",
)
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _claim(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read("claims")["claims"][name]["found"]
    return found


def categories() -> str:
    """Show what each category is for."""
    return "".join(f"- `{name}`: {words}\n" for name, words in CATEGORY_WORDS.items())


def claims() -> str:
    """Say what came of each claim, with its figures."""
    small, old = _claim("one_and_a_half_billion_in_5_gb"), list(_claim("forty_nine_gb_for_0_6b").values())
    adam, costs = list(_claim("eight_bit_adam").values()), _claim("checkpointing_costs")
    added, qlora = _claim("accumulation"), _claim("qlora_is_gb_per_billion")
    at_peak, needed = old[0]["at_the_peak_gib"], [f"{row['needed_gib']:.2f}" for row in old]
    base, large = ({key: f"{row[key]:.2f}" for key in ("qlora_gb", "lora_gb")} for row in qlora.values())
    gradients = {f"{row['gradients_gib']:.2f}" for row in added.values()}
    said = (
        f"*A 0.6B model takes 49 GB* ([trl#3456](https://github.com/huggingface/trl/issues/3456): 49,273 MiB for "
        f"Qwen3-0.6B, 4 × (2048 + 1024) tokens). **True, to 1%**: {needed[0]} GiB with float32 weights, a reference "
        f"copy, no checkpointing and logits in full, as TRL worked then. Activations are "
        f"{at_peak['activations']:.2f}, logits {at_peak['loss_logits']:.2f}, weights {at_peak['weights']:.2f}. Today's "
        f"loss needs {needed[1]}, with checkpointing {needed[2]}, with bf16 weights and no reference {needed[3]}.",
        f"*QLoRA needs as many GB as the model has billions of parameters, LoRA four times that.* **Near for 7B; LoRA "
        f"takes twice that**: {large['qlora_gb']} GB for Qwen2.5-7B (LoRA {large['lora_gb']}), {base['qlora_gb']} for "
        f"the 1.5B ({base['lora_gb']}), at 256 + 768 tokens, rank 16.",
        f"*8-bit Adam takes 4 bytes a parameter, not 8.* **Half right**: {adam[1]:.2f} for Qwen2.5-0.5B, where torch's "
        f"takes {adam[0]:.2f}, and {adam[2]:.2f} with bf16 weights. It takes 2.03 for each parameter that it quantises "
        "and 8 for embeddings, 28% of this small model.",
        f"*Checkpointing makes a step 20 to 30% slower.* **About right** for forward and backward of a small Llama: "
        f"{costs['flops_ratio']:.2f} times the operations, {costs['time_ratio_cpu_median']:.2f} times the time (median "
        "of seven pairs on a CPU). Generation is unchanged.",
        f"*1.5B in 5 GB.* **True**: QLoRA of Qwen2.5-1.5B needs {small['256 + 256']['needed_gb']:.2f} GB at 256 + 256 "
        f"tokens and {small['256 + 768']['needed_gb']:.2f} at 256 + 768; each further "
        "completion of 1024 tokens adds 0.03.",
        f"*Accumulation stores gradients further back.* **False**: {' or '.join(gradients)} GiB of gradients in "
        f"Qwen2.5-0.5B with 1, 2 or 4 steps. The second micro-batch runs while the first's gradients are allocated, so "
        f"the peak rises once, from {added['1']['peak_gib']:.2f} to {added['2']['peak_gib']:.2f}. The generation batch "
        "grows where `steps_per_generation` follows the accumulation (TRL's default).",
    )
    return "".join(
        textwrap.fill(f"- {one}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"
        for one in said
    )


def memory_own() -> str:
    """Show every category of the two runs of docs/grpo-memory.md."""
    runs = read("memory_pictures")["runs"]
    order = [c for c in Category if any(run["own_peaks"].get(c, 0) > 5e6 for run in runs.values())]
    rows: list[list[object]] = []
    for category in order:
        figures = [run[key].get(category, 0) / GIB for run in runs.values() for key in ("peak_categories", "own_peaks")]
        rows.append([CATEGORY_LABELS[category], *figures])
    rows.append(["Total", *(v for run in runs.values() for v in (run["peak_bytes"] / GIB, ""))])
    return table(("GiB", "full: at the peak", "per-category peak", "LoRA: at the peak", "per-category peak"), rows)


def fit() -> str:
    """Show the rows of ``examples/fit_7b_on_one_gpu.py --full --completions 4``."""
    rows = read("fit_7b")
    by = {row["step"]: row["device_peak_bytes"] / GIB for row in rows}
    return table(("Qwen2.5-7B, 4 × (256 + 786) tokens", "GiB needed", "fits 24 GB", "peak is in"), [
        (row["step"], by[row["step"]], "yes" if row["fits"] else "no", row["peak_phase"]) for row in rows
    ])  # fmt: skip


def generations() -> str:
    """Show the rows of ``examples/num_generations.py``."""
    rows = read("num_generations")
    counts = sorted({row["num_generations"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows))
    by = {(row["way"], row["num_generations"]): row["device_peak_bytes"] / GIB for row in rows}
    return table(("Qwen2.5-0.5B, full, bf16; GiB needed by completions a prompt", *map(str, counts)),
                 [(way, *(by.get((way, n), "–") for n in counts)) for way in ways])  # fmt: skip


def advice(part: str) -> str:
    """Say what ``benchmarks.advice`` found: how far off the predicted savings were."""
    found = read("advice")[part]
    whole, digits = found["summary"], {"real": 5, "simulated": 2}[part]
    runs = len({row["run"] for row in found["rows"]})
    median, largest, of_peak = (
        f"{100 * whole[key]:.{digits}f}%" for key in ("median_error", "largest_error", "largest_error_of_peak")
    )
    return (
        f"{whole['changes']} changes of {runs} runs: median error {median}, largest {largest} ({of_peak} of the\n"
        f"peak), wrong in sign among the first three of a run: {whole['wrong_sign_in_first_three']}.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "categories": categories,
    "claims": claims,
    "memory-own": memory_own,
    "fit": fit,
    "generations": generations,
    "advice-real": lambda: advice("real"),
    "advice-simulated": lambda: advice("simulated"),
    "cuda-versions": lambda: cuda_versions.table_of(cuda_versions.read()),
    "classes": lambda: classes.class_table(classes.gathered()),
    "decisions": lambda: decisions.table(read("decisions")),
    "rivals": lambda: rivals.table(read("rivals")),
    "fields": fields.fields_table,
    "shortcuts": lambda: shortcuts.table_of(read("shortcuts")),
    "emulated-matrix": lambda: matrix.table(matrix.read()) + "\n",
    "emulated-edges": lambda: edges.table(edges.read()) + "\n",
    "published-methods": lambda: published_tables.methods_table(read("published_methods")),
    "published-components": lambda: published_tables.components_table(read("published_components")),
    "published-sft": lambda: published_tables.sft_table(read("published_sft")),
    "survival": lambda: survival.table() + "\n",
    "injections": injections_table,
    "inputs": inputs_table,
    **lean_tables.TABLES,
    **forms_table.TABLES,
}


def filled(text: str) -> str:
    """Make the tables of a page's text anew."""
    return _PLACE.sub(lambda m: f"{m.group(1)}\n{TABLES[m.group(2)]()}\n{m.group(3)}", text)


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 where a table differs.")
def main(check: bool) -> None:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(page.name)
            if not check:
                page.write_text(new, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale) or 'none'}")
    sys.exit(1 if check and stale else 0)
