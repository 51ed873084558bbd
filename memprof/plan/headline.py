"""Write a plan's headline: how many rows fit, what the smallest needs most, what to choose, what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.config.trl_arguments import assumed_words
from memprof.units import amount, gib, percent
from memprof.vocabulary import CATEGORY_LABELS, phase_words

__all__ = ["headline_of_plan"]

_LABELS = {str(category): label.lower() for category, label in CATEGORY_LABELS.items()}
# What the methods set themselves, where nobody gave it.
_OWN = {"dtype": "dtype", "lora_r": "adapter", "gradient_checkpointing": "checkpointing", "optim": "optimizer"}


def headline_of_plan(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``headline`` of ``memprof.plan/1``, as of a report; a plan names no ``places``."""
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
        "assumed": _assumed(data),
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
        how = f"Fastest that fits ({method})" if data.get("fastest") else f"Largest of these that fits ({method})"
    return (
        f"{how}: {config['per_device_train_batch_size']} completions in a micro-batch of "
        f"{config['prompt_length']} + {config['completion_length']} tokens, "
        f"{gib(best['device_peak_bytes'])} GiB needed."
    )


def _assumed(data: Mapping[str, Any]) -> list[str]:
    """Say what nobody gave: what every row has alike, and what each method sets itself."""
    first, *others = (row["config"] for row in data["rows"])
    alike = [
        name for name in first.get("assumed") or ()
        if all(name in (more.get("assumed") or ()) and more.get(name) == first.get(name) for more in others)
    ]  # fmt: skip
    own = [words for name, words in _OWN.items() if any(more.get(name) != first.get(name) for more in others)]
    chosen = [f"each method's own {', '.join(own)}"] if own and "=" not in data["rows"][0]["method"] else []
    return [*assumed_words({**first, "assumed": alike}), *chosen]
