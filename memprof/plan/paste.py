"""A plan in words: a table for a terminal or Markdown, and a configuration ready to paste."""

from __future__ import annotations

from memprof.plan.planner import Plan, Row
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS, Category

__all__ = ["as_python", "as_yaml", "markdown", "text"]


def _cells(plan: Plan) -> list[tuple[str, ...]]:
    head = ("Method", "Verdict", "Needed GiB", "Allocated GiB", "Host GiB", "Highest in", "Largest")
    rows = [
        (
            row.method,
            "fits" if row.fits else "OOM",
            format_gib(row.device_peak_bytes),
            format_gib(row.peak_bytes),
            format_gib(row.host_bytes),
            row.phase,
            CATEGORY_LABELS[Category(row.largest_category)],
        )
        for row in plan.rows
    ]
    return [head, *rows]


def text(plan: Plan, drawn: str = "") -> str:
    """For a terminal; ``drawn`` is the rows as bars."""
    cells = _cells(plan)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numbers = {2, 3, 4}
    lines = [f"{plan.model} on {plan.gpu}", ""]
    for row in cells:
        parts = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return "\n".join([*lines, "", *([drawn] if drawn else []), *_ending(plan), "", *_notes(plan), ""])


def markdown(plan: Plan) -> str:
    """For a README or an issue."""
    head, *rows = _cells(plan)
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|--:|--:|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", *_ending(plan, fence=True), "", *_notes(plan), ""])


def _notes(plan: Plan) -> list[str]:
    """How far off all of this may be."""
    return [str(plan.to_dict()["expected_error"]["sentence"])]


def _ending(plan: Plan, fence: bool = False) -> list[str]:
    if plan.best is None:
        return ["Nothing tried fits. A smaller model, a larger card, or shorter sequences are left."]
    best = plan.best
    size = best.settings
    how = f"Best found ({best.method}, most {plan.maximized.replace('_', ' ')})"
    if "=" in best.method:  # a value of --vary
        how = f"Largest of these that fits ({best.method})"
    sentence = (
        f"{how}: {size.per_device_train_batch_size} "
        f"completions in a micro-batch of {size.prompt_length} + {size.completion_length} tokens, "
        f"{format_gib(best.device_peak_bytes)} GiB needed."
    )
    code = as_python(best)
    return [sentence, "", *(["```python", code, "```"] if fence else [code])]


def _arguments(row: Row) -> dict[str, object]:
    s = row.settings
    cache = {} if s.cache_implementation == "dynamic" else {"cache_implementation": s.cache_implementation}
    return {
        "per_device_train_batch_size": s.per_device_train_batch_size,
        "gradient_accumulation_steps": s.gradient_accumulation_steps,
        "steps_per_generation": s.generation_steps,
        "num_generations": s.num_generations,
        "max_completion_length": s.completion_length,
        "gradient_checkpointing": bool(s.gradient_checkpointing),
        "optim": s.optim,
        "bf16": s.mixed_precision == "bf16",
        "beta": s.beta,
        "model_init_kwargs": {"dtype": s.dtype},
        **cache,
    }


def _lean(row: Row) -> dict[str, object]:
    """What only the lean trainer's config has."""
    s = row.settings
    if s.recipe != "lean":
        return {}
    names = ("max_tokens_per_piece", "tiled_mlp", "prefix_sharing", "generation_batch")
    chosen = {name: getattr(s, name) for name in names if getattr(s, name)}
    return {"checkpointing": s.checkpointing, **chosen}


def as_python(row: Row) -> str:
    """``GRPOConfig(...)`` and, for an adapter, ``LoraConfig(...)``."""
    lines = ["args = LeanGRPOConfig(" if row.settings.recipe == "lean" else "args = GRPOConfig("]
    lines += [f"    {name}={value!r}," for name, value in {**_arguments(row), **_lean(row)}.items()]
    lines.append(")")
    if row.settings.lora_r is not None:
        targets: object = list(row.settings.lora_target_modules)
        if targets == ["all-linear"]:
            targets = "all-linear"
        rank = row.settings.lora_r
        lines.append(f"peft_config = LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules={targets!r})")
    if row.settings.recipe != "lean" and row.settings.checkpointing in ("selective", "offloaded"):
        lines.append(f"# {row.settings.checkpointing} checkpointing: wrap the model first (docs/simulating.md)")
    if row.settings.load_in_4bit:
        lines.append("quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')")
    return "\n".join(lines)


def as_yaml(row: Row) -> str:
    """The same for TRL's command line."""
    import json

    lines = [f"{name}: {json.dumps(value)}" for name, value in _arguments(row).items()]
    if row.settings.lora_r is not None:
        lines += ["use_peft: true", f"lora_r: {row.settings.lora_r}"]
    if row.settings.load_in_4bit:
        lines.append("load_in_4bit: true")
    return "\n".join(lines) + "\n"
