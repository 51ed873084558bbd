"""Find advice by simulating: what ``memprof advise`` and ``memprof report --advise`` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.analysis.headline import with_headline


def check_card(gpu: str | None) -> None:
    """Refuse (UsageError) a card that is neither a known name nor a size, before anything is read."""
    if gpu is not None:
        from memprof.config.gpus import find_gpu

        find_gpu(gpu)


def estimated(report: Mapping[str, Any], gpu: str | None = None, why: str = "") -> dict[str, Any]:
    """Return the report with its advice estimated from recorded sizes, whatever advice it had; ``gpu`` is the card that
    the run is to fit, ``why`` says in the report's notes why nothing is simulated."""
    from memprof.advice.estimate import estimated_advice
    from memprof.advice.simulated_advice import estimated_parts

    return with_headline({**report, "advice": estimated_advice(report), **estimated_parts(report, gpu, why)})


def simulated(
    report: Mapping[str, Any], gpu: str | None, seconds: float, workers: int | None = None, use_cache: bool = True
) -> dict[str, Any]:
    """Return the report with its advice simulated for at most ``seconds``; a note says why where it cannot be."""
    from memprof.advice.simulated_advice import simulated_parts
    from memprof.cli.progress import progress
    from memprof.plan.cache import cache_folder

    with progress() as told:
        found = simulated_parts(
            report, cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers, use_cache=use_cache,
            progress=told,
        )  # fmt: skip
    return with_headline({**report, **found})


def fits_asked_card(report: Mapping[str, Any]) -> bool:
    """Tell whether changes that make the run fit ``--gpu`` were found; True without ``--gpu``."""
    return "combination" not in report or bool(report["combination"]["fits"])
