"""Write a plan's headline: how many rows fit, what the smallest needs most, what to choose, what was assumed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from memprof.config.gpus import size_words
from memprof.config.trl_arguments import assumed_words
from memprof.plan.sizes import is_number
from memprof.report.advice import Headline
from memprof.report.plan import Plan, PlanRow
from memprof.report.run import KnownSettings
from memprof.units import amount, gib, percent
from memprof.vocabulary import CATEGORY_LABELS, phase_words

# What the methods set themselves, where nobody gave it; the dtype is told with its values.
_OWN = {"lora_r": "adapter", "gradient_checkpointing": "checkpointing", "optim": "optimizer"}


def headline_of_plan(plan: Plan, not_given: Collection[str]) -> Headline:
    """Return the ``headline`` of ``memprof.plan/1``, as of a report; a plan names no ``places``.

    ``not_given``: names of the settings that nobody gave, which the methods and the defaults decide.
    """
    smallest = min(plan.rows, key=lambda row: row.device_peak_bytes)
    category, held = smallest.largest_category, smallest.categories
    how_much = f": {amount(held[category])} ({percent(held[category], sum(held.values()))})" if held else ""
    return Headline(
        verdict=_verdict(plan, smallest),
        cause=f"The largest part of its peak, in {phase_words(smallest.phase).lower()}, is "
        f"{CATEGORY_LABELS[category].lower()}{how_much}.",
        places=(),
        action=_action(plan),
        assumed=(*_assumed(plan.rows, not_given), *filter(None, [size_words(plan.gpu)])),
    )


def _verdict(plan: Plan, smallest: PlanRow) -> str:
    rows, gpu = plan.rows, plan.gpu
    fitting = sum(row.fits for row in rows)
    varied = all("=" in row.method for row in rows)
    given = "" if varied else " as given"
    need = f"the smallest, {smallest.method}, needs {gib(smallest.device_peak_bytes)} of {gib(plan.total_bytes)} GiB"
    if fitting:
        return f"{fitting} of {len(rows)} {'values' if varied else 'methods'} fit {gpu}{given}; {need}"
    return f"Does not fit {gpu} as given: {need}" if plan.best else f"Nothing tried fits {gpu}: {need}"


def _action(plan: Plan) -> str:
    best = plan.best
    if not best:
        return "Use a smaller model, a larger GPU or shorter sequences."
    config, method = best.config, best.method
    how = f"Best found ({method}, most {plan.maximized.replace('_', ' ')})"
    if "=" in method:  # a value of --vary
        value = config[method.partition("=")[0]]
        how = f"{'Largest value' if is_number(value) else 'What needs most of those'} that fits ({method})"
    elif plan.maximized == "speed":
        how = f"Fastest found ({method})"
    elif all(row.largest is None for row in plan.rows):  # nothing was searched
        how = f"Recommended ({method})"
    return (
        f"{how}: {config['per_device_train_batch_size']} completions in a micro-batch of "
        f"{config['prompt_length']} + {config['completion_length']} tokens, "
        f"{gib(best.device_peak_bytes)} GiB needed."
    )


def _assumed(rows: Sequence[PlanRow], not_given: Collection[str]) -> list[str]:
    """Say what nobody gave: what every row has alike, and what each method sets itself."""
    configs = [KnownSettings.of(row.config) for row in rows]
    first = configs[0]
    differ = {name for name in not_given if any(row.config.get(name) != rows[0].config.get(name) for row in rows)}
    if "=" in rows[0].method:  # values of --vary: what a row does not call assumed was given by it
        alike = [n for n in not_given if n not in differ and all(n in config.assumed for config in configs)]
        return assumed_words(msgspec.structs.replace(first, assumed=tuple(alike)))
    alike = [name for name in not_given if name not in differ]
    words = assumed_words(msgspec.structs.replace(first, assumed=tuple(alike)))
    if "dtype" in differ:
        words.append(_dtypes(rows))
    own = [word for name, word in _OWN.items() if name in differ]
    return [*words, f"each method's own {', '.join(own)}"] if own else words


def _dtypes(rows: Sequence[PlanRow]) -> str:
    """Say which methods load weights in which dtype: name the rarer dtypes' methods, and sum up the most common one."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(row.config["dtype"], []).append(row.method)
    *named, (most, _) = sorted(methods.items(), key=lambda item: len(item[1]))
    words = [f"{dtype} weights in {', '.join(names)}" for dtype, names in named]
    return f"{', '.join(words)}, {most} in the others"
