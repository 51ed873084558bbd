"""Put tables of measured figures into the documentation, between ``<!-- table: NAME -->`` and ``<!-- end -->``.

    python -m benchmarks.docs tables [--check]

The figures are those of ``benchmarks/results/*/*.json``, the forms of ``docs/oom.md`` those of the tests;
``--check`` (and a test) only compares. Nothing is simulated here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import click
from memprof.reports.document.text import CATEGORY_WORDS

from benchmarks.faults.inject import injections_table
from benchmarks.faults.mutate import inputs_table
from benchmarks.lean import tables as lean_tables
from benchmarks.lean.equality import survival
from benchmarks.oom import forms_table
from benchmarks.simulator import classes, decisions, rivals, shortcuts
from benchmarks.simulator.emulated import edges, matrix
from benchmarks.tabling import ROOT, read, table
from benchmarks.versions import cuda as cuda_versions
from examples import published_tables
from memprof.units import GIB
from memprof.vocabulary import CATEGORY_LABELS, Category

_FILLED = "accuracy advice emulate faq glossary grpo-memory lean-techniques lean-trainer measurements oom simulating"
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in _FILLED.split()),
    ROOT / "examples" / "README.md",
)
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _claim(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read("claims")["claims"][name]["found"]
    return found


def categories() -> str:
    """Show what each category is for."""
    return table(("category", "what for"), [(f"`{name}`", words) for name, words in CATEGORY_WORDS.items()])


def qlora() -> str:
    """Show GB by size."""
    head = ("model", "billions of parameters", "QLoRA, GB", "per billion", "LoRA, GB", "LoRA ÷ QLoRA")
    return table(head, [
        (f"Qwen2.5-{size}", row["parameters"] / 1e9, row["qlora_gb"], row["qlora_gb_per_billion"], row["lora_gb"],
         row["lora_to_qlora"])
        for size, row in _claim("qlora_is_gb_per_billion").items()
    ])  # fmt: skip


def adam() -> str:
    """Show bytes a parameter."""
    return table(("Qwen2.5-0.5B", "bytes of optimizer state a parameter"), list(_claim("eight_bit_adam").items()))


def accumulation() -> str:
    """Show peaks by accumulation steps."""
    head = ("Qwen2.5-0.5B, full, bf16; accumulation steps", "gradients, own peak, GiB", "peak, GiB", "peak is in")
    rows = _claim("accumulation").items()
    return table(head, [(n, row["gradients_gib"], row["peak_gib"], row["phase"]) for n, row in rows])


def five_gb() -> str:
    """Show GB needed by completion length."""
    rows = _claim("one_and_a_half_billion_in_5_gb").items()
    head = ("prompt + completion", "GB needed", "peak is in", "largest")
    return table(head, [(n, r["needed_gb"], r["phase"], CATEGORY_LABELS[Category(r["largest"])]) for n, r in rows])


def forty_nine() -> str:
    """Show what the 49 GB are."""
    runs = _claim("forty_nine_gb_for_0_6b")
    rows = []
    for name, row in runs.items():
        parts = ", ".join(
            f"{CATEGORY_LABELS[Category(c)].lower()} {gib:.2f}" for c, gib in row["at_the_peak_gib"].items()
        )
        rows.append((name, row["needed_gib"], row["phase"], parts))
    return table(("Qwen3-0.6B", "GiB needed", "peak is in", "at the peak, GiB"), rows)


def slower() -> str:
    """Show what checkpointing costs."""
    found = _claim("checkpointing_costs")
    rows = [("floating-point operations", found["flops_ratio"]), ("time on a CPU", found["time_ratio_cpu_median"])]
    return table(("forward and backward of a small Llama", "checkpointed ÷ not"), rows)


def memory_own() -> str:
    """Show every category of the two runs of docs/grpo-memory.md."""
    runs = read("memory_pictures")["runs"]
    order = [c for c in Category if any(run["own_peaks"].get(c, 0) > 5e6 for run in runs.values())]
    rows: list[list[object]] = []
    for category in order:
        figures = [run[key].get(category, 0) / GIB for run in runs.values() for key in ("peak_categories", "own_peaks")]
        rows.append([CATEGORY_LABELS[category], *figures])
    rows.append(["Total", *(v for run in runs.values() for v in (run["peak_bytes"] / GIB, ""))])
    return table(("GiB", "full: at the peak", "own peak", "LoRA: at the peak", "own peak"), rows)


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
        f"{100 * whole[key]:.{digits}f} %" for key in ("median_error", "largest_error", "largest_error_of_peak")
    )
    return (
        f"{whole['changes']} changes of {runs} runs: median error {median}, largest {largest} ({of_peak} of the\n"
        f"peak), wrong in sign among the first three of a run: {whole['wrong_sign_in_first_three']}.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    "categories": categories,
    "qlora": qlora,
    "adam": adam,
    "accumulation": accumulation,
    "five-gb": five_gb,
    "forty-nine": forty_nine,
    "slower": slower,
    "memory-own": memory_own,
    "fit": fit,
    "generations": generations,
    "advice-real": lambda: advice("real"),
    "advice-simulated": lambda: advice("simulated"),
    "cuda-versions": lambda: cuda_versions.table_of(cuda_versions.read()),
    "classes": lambda: classes.class_table(classes.gathered()),
    "decisions": lambda: decisions.table(read("decisions")),
    "rivals": lambda: rivals.table(read("rivals")),
    "shortcuts": lambda: shortcuts.table_of(read("shortcuts")),
    "emulated-matrix": lambda: matrix.table(matrix.read()) + "\n",
    "emulated-edges": lambda: edges.table(edges.read()) + "\n",
    "published-methods": lambda: published_tables.methods_table(read("published_methods")),
    "published-components": lambda: published_tables.components_table(read("published_components")),
    "published-sft": lambda: published_tables.sft_table(read("published_sft")),
    "survival": lambda: survival.table() + "\n",
    "injections": injections_table,
    "inputs": inputs_table,
    **{name: made for name, made in lean_tables.TABLES.items() if name not in lean_tables.PRINTED},
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
