"""Run tasks in turn, take medians, and name the versions and machine they were measured with."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("grpo-memprof", "torch", "transformers", "trl", "peft", "liger-kernel", "numpy", "click")


def interleaved(tasks: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run every task once a round, in turning order, so that a slow minute of the machine meets them all."""
    names = list(tasks)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(tasks[name]())
    return results


def ratio(results: Mapping[str, list[dict[str, float]]], name: str, base: str, key: str) -> float:
    """Return the median over the rounds of ``key`` for ``name`` divided by ``key`` for ``base`` in the same round."""
    pairs = zip(results[name], results[base], strict=True)
    return statistics.median(one[key] / other[key] for one, other in pairs)


def environment() -> dict[str, Any]:
    """Return versions and machine, without names of people, hosts or folders."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count()}
    return {"python": platform.python_version(), **machine, "versions": found}


def write_result(result: dict[str, Any], path: Path | None) -> None:
    """Print the result and, where a path is given, keep it."""
    text = json.dumps({**result, "environment": environment()}, indent=2)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
