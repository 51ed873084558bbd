"""Find advice by simulating: what ``memprof advise`` and ``memprof report --advise`` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from memprof.analysis.headline import with_headline
from memprof.report import Report
from memprof.report.codec import from_builtins, to_builtins


def check_card(gpu: str | None) -> None:
    """Refuse (UsageError) a card that is neither a known name nor a size, before anything is read."""
    if gpu is not None:
        from memprof.config.gpus import find_gpu

        find_gpu(gpu)


def estimated(report: Mapping[str, Any], gpu: str | None = None, why: str = "") -> dict[str, Any]:
    """Return the report with its advice estimated from recorded sizes, whatever advice it had; ``gpu`` is the card that
    the run is to fit, ``why`` says in the report's notes why nothing is simulated."""
    from memprof.advice.estimate import estimated_advice
    from memprof.advice.simulated_advice import with_estimated_combination

    typed = from_builtins(report, Report)
    typed = replace(typed, advice=estimated_advice(typed))
    return to_builtins(with_headline(with_estimated_combination(typed, gpu, why)))


def simulated(
    report: Mapping[str, Any], gpu: str | None, seconds: float, workers: int | None = None, use_cache: bool = True
) -> dict[str, Any]:
    """Return the report with its advice simulated for at most ``seconds``; a note says why where it cannot be."""
    from memprof.advice.simulated_advice import with_simulated_advice
    from memprof.cli.progress import progress
    from memprof.plan.cache import cache_folder

    with progress() as told:
        found = with_simulated_advice(
            from_builtins(report, Report), cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers,
            use_cache=use_cache, progress=told,
        )  # fmt: skip
    return to_builtins(with_headline(found))


def fits_asked_card(report: Mapping[str, Any]) -> bool:
    """Tell whether changes that make the run fit ``--gpu`` were found; True without ``--gpu``."""
    return "combination" not in report or bool(report["combination"]["fits"])
