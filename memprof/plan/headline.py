"""Write a plan's headline: how many rows fit, what the smallest needs most, what to choose, what was assumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from memprof.config.gpus import size_words
from memprof.config.trl_arguments import assumed_words
from memprof.units import amount, gib, percent
from memprof.vocabulary import CATEGORY_LABELS, phase_words

_LABELS = {str(category): label.lower() for category, label in CATEGORY_LABELS.items()}
# What the methods set themselves, where nobody gave it; the dtype is told with its values.
_OWN = {"lora_r": "adapter", "gradient_checkpointing": "checkpointing", "optim": "optimizer"}


def headline_of_plan(data: Mapping[str, Any], not_given: Collection[str]) -> dict[str, Any]:
    """Return the ``headline`` of ``memprof.plan/1``, as of a report; a plan names no ``places``.

    ``not_given``: names of the settings that nobody gave, which the methods and the defaults decide.
    """
    smallest = min(data["rows"], key=lambda row: row["device_peak_bytes"])
    category, held = smallest["largest_category"], smallest["categories"]
    # A runner that keeps old results may not know how much.
    how_much = f": {amount(held[category])} ({percent(held[category], sum(held.values()))})" if held else ""
    return {
        "verdict": _verdict(data, smallest),
        "cause": f"The largest part of its peak, in {phase_words(smallest['phase']).lower()}, is "
        f"{_LABELS[category]}{how_much}.",
        "places": [],
        "action": _action(data),
        "assumed": [*_assumed(data, not_given), *filter(None, [size_words(data["gpu"])])],
    }


def _verdict(data: Mapping[str, Any], smallest: Mapping[str, Any]) -> str:
    rows, gpu = data["rows"], data["gpu"]
    fitting = sum(row["fits"] for row in rows)
    varied = all("=" in row["method"] for row in rows)
    given = "" if varied else " as given"
    need = f"the smallest, {smallest['method']}, needs {gib(smallest['device_peak_bytes'])} of "
    need += f"{gib(data['total_bytes'])} GiB"
    if fitting:
        return f"{fitting} of {len(rows)} {'values' if varied else 'methods'} fit {gpu}{given}; {need}"
    return f"Does not fit {gpu} as given: {need}" if data["best"] else f"Nothing tried fits {gpu}: {need}"


def _action(data: Mapping[str, Any]) -> str:
    best = data["best"]
    if not best:
        return "Use a smaller model, a larger card or shorter sequences."
    config, method = best["config"], best["method"]
    how = f"Best found ({method}, most {data['maximized'].replace('_', ' ')})"
    if "=" in method:  # a value of --vary
        how = f"Largest of these that fits ({method})"
    elif data["maximized"] == "speed":
        how = f"Fastest found ({method})"
    elif not any("largest" in row for row in data["rows"]):  # nothing was searched
        how = f"Recommended ({method})"
    return (
        f"{how}: {config['per_device_train_batch_size']} completions in a micro-batch of "
        f"{config['prompt_length']} + {config['completion_length']} tokens, "
        f"{gib(best['device_peak_bytes'])} GiB needed."
    )


def _assumed(data: Mapping[str, Any], not_given: Collection[str]) -> list[str]:
    """Say what nobody gave: what every row has alike, and what each method sets itself."""
    rows = data["rows"]
    first, *others = (row["config"] for row in rows)
    differ = {name for name in not_given if any(more.get(name) != first.get(name) for more in others)}
    if "=" in rows[0]["method"]:  # values of --vary: what a row does not call assumed was given by it
        alike = [n for n in not_given if n not in differ and all(n in row["config"]["assumed"] for row in rows)]
        return assumed_words({**first, "assumed": alike})
    words = assumed_words({**first, "assumed": [name for name in not_given if name not in differ]})
    if "dtype" in differ:
        words.append(_dtypes(rows))
    own = [word for name, word in _OWN.items() if name in differ]
    return [*words, f"each method's own {', '.join(own)}"] if own else words


def _dtypes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which methods load weights in which dtype: name the rarer dtypes' methods, and sum up the most common one."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        methods.setdefault(row["config"]["dtype"], []).append(row["method"])
    *named, (most, _) = sorted(methods.items(), key=lambda item: len(item[1]))
    words = [f"{dtype} weights in {', '.join(names)}" for dtype, names in named]
    return f"{', '.join(words)}, {most} in the others"
