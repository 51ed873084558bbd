"""Show where the memory of Llama-3.1-8B at 20480 tokens and 8 completions goes, in rows as published.

    python examples/context_20k.py                # SmolLM2-135M at 2048 tokens: the same rows, under a minute
    python examples/context_20k.py --full         # Llama-3.1-8B at 20480 tokens: some minutes, about 2 GB of memory
    python examples/context_20k.py --full -o context.html

Columns: TRL as it was, with logits materialised; the installed TRL; and, where it is installed, the lean trainer. Each
is LoRA of rank 16 on all linear layers under gradient checkpointing, in bfloat16, with the eight completions in one
micro-batch, executed on tensors without values. Beside them stand the figures Unsloth published in February 2025, which
are components added up and not a peak; the notes under the table say what is known about each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memprof.reports.document.build import document_of
from memprof.reports.document.comparison import build_comparison
from memprof.reports.document.model import Document
from memprof.reports.html.compare import write_comparison
from simulations import ending, options, save, table

from memprof.analysis.compare import ComparisonColumn, compare
from memprof.analysis.published_tables import published_columns
from memprof.config.gpus import find_gpu
from memprof.config.settings import CHOICES, Settings
from memprof.report.codec import to_builtins
from memprof.report.comparison import Comparison
from memprof.simulate.evaluate import evaluate
from memprof.units import format_gib

RECIPES = {"trl-full-logits": "TRL, logits materialised", "trl": "TRL today", "lean": "Lean trainer"}
PUBLISHED_SET = "unsloth-2025"


def settings_of(model: str, context: int, recipe: str) -> Settings:
    """Return the published configuration, as far as known: 8 completions, the first 1024 tokens the prompt."""
    prompt = min(1024, context // 8)
    return Settings(
        model=model,
        recipe=recipe,
        dtype="bfloat16",
        lora_r=16,
        gradient_checkpointing=True,
        num_generations=8,
        per_device_train_batch_size=8,
        prompt_length=prompt,
        completion_length=context - prompt,
    )


def simulated(settings: Settings, gpu: str) -> tuple[ComparisonColumn, Document]:
    """Simulate one column, and its timeline for the page."""
    print(f"Simulating: {RECIPES[settings.recipe]}", file=sys.stderr, flush=True)
    analysis = evaluate(settings, find_gpu(gpu)).analysis
    return ComparisonColumn(RECIPES[settings.recipe], "simulated", report=analysis.report), document_of(analysis)


def rows_as_published(answer: Comparison) -> str:
    """Show GiB: each row's own peak as published tables have it, in brackets its part of the whole's peak."""
    rows = []
    for row in answer.rows:
        pairs = zip(row.own_peak, row.at_peak, strict=True)
        rows.append([row.label, *(_cell(own, at) for own, at in pairs)])
    return table(["GiB: own peak (at the peak)", *(run.label for run in answer.runs)], rows)


def _cell(own: int | None, at_peak: int | None) -> str:
    if own is None:
        return "-" if at_peak is None else format_gib(at_peak)
    return f"{format_gib(own)} ({format_gib(at_peak or 0)})"


def main(argv: list[str] | None = None) -> None:
    """Simulate the columns and print the comparison."""
    parser = options(__doc__)
    parser.add_argument("--full", action="store_true", help="Llama-3.1-8B at 20480 tokens, as published")
    parser.add_argument("--model", help="hub id of the catalogue or config.json")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="prompt and completion")
    there = [recipe for recipe in RECIPES if recipe in CHOICES["recipe"]]
    parser.add_argument("--recipes", help=f"of {', '.join(there)}, parted by commas")
    parser.add_argument("--gpu", default="H100", metavar="NAME|SIZE")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="the comparison as a page")
    arguments = parser.parse_args(argv)
    model = arguments.model or (
        "meta-llama/Llama-3.1-8B-Instruct" if arguments.full else "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    context = arguments.context or (20480 if arguments.full else 2048)
    published = arguments.full and not arguments.model and not arguments.context
    recipes = arguments.recipes.split(",") if arguments.recipes else there
    if unknown := set(recipes) - set(there):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    columns = [simulated(settings_of(model, context, recipe), arguments.gpu) for recipe in recipes]
    beside = (
        [ComparisonColumn(c.label, "published", published=c) for c in published_columns(PUBLISHED_SET)]
        if published
        else []
    )
    answer = compare([*(run for run, _ in columns), *beside], find_gpu(arguments.gpu).total_bytes)
    save(to_builtins(answer), arguments.json)
    print(rows_as_published(answer))
    print("\n" + "\n".join(f"- {note}" for run in beside for note in run.published.notes) if beside else "")
    if arguments.output:
        timelines = [*(timeline for _, timeline in columns), *(None for _ in beside)]
        write_comparison(build_comparison(answer, timelines), arguments.output)
        print(f"Page: {arguments.output}")


if __name__ == "__main__":
    ending(main)
