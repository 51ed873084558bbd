"""Advice found by simulating: what ``memprof advise`` and ``memprof report --advise`` share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["check_card", "end_with_combination", "estimated", "seconds_option", "simulated"]

seconds_option = click.option(
    "--seconds", type=click.FloatRange(min=0), default=180.0, show_default=True, metavar="S",
    help="Stop starting simulations after this long; what is left is estimated.",
)  # fmt: skip


def check_card(gpu: str | None) -> None:
    """Refuse a card that is not known before anything is read.

    Raises:
        UsageError: it is neither a name nor a size.
    """
    if gpu is not None:
        from memprof.config.gpus import find_gpu

        find_gpu(gpu)


def estimated(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report with estimates for its advice, whatever it had."""
    from memprof.advice import estimated_advice

    return {**report, "advice": estimated_advice(report)}


def simulated(
    report: Mapping[str, Any],
    gpu: str | None,
    seconds: float,
    workers: int | None = None,
    use_cache: bool = True,
) -> dict[str, Any]:
    """A report whose advice is simulated, as far as ``seconds`` go; where that cannot be, a note says why.

    Raises:
        InputError, UsageError: ``gpu`` was asked about, and the run cannot be simulated.
    """
    from memprof.advice.advise import simulated_parts
    from memprof.cli.commands.plan import progress
    from memprof.plan.cache import cache_folder

    with progress() as told:
        found = simulated_parts(
            report, cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers, use_cache=use_cache,
            progress=told,
        )  # fmt: skip
    return {**report, **found}


def end_with_combination(report: Mapping[str, Any]) -> None:
    """Exit code 4 where changes were looked for that make the run fit a card, and none were found."""
    if "combination" in report and not report["combination"]["fits"]:
        sys.exit(4)
