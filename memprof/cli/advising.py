"""Find advice by simulating: what ``memprof advise`` and ``memprof report --advise`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.analysis.views import Views
    from memprof.report import Report


def check_card(gpu: str | None) -> None:
    """Refuse (UsageError) a GPU that is neither a known name nor a size, before anything is read."""
    if gpu is not None:
        from memprof.config.gpus import find_gpu

        find_gpu(gpu)


def estimated(report: Report, gpu: str | None = None, why: str = "", analysis: Views | None = None) -> Report:
    """Return the report with its advice estimated from recorded sizes. A report that has estimates keeps them, so that
    every command gives one answer; simulated advice is replaced.

    Args:
        gpu: the GPU that the run is to fit.
        why: why nothing is simulated, for the report's notes.
        analysis: what the report is of, None where only the report is known.
    """
    from msgspec.structs import replace

    from memprof.advice.estimate import estimated_advice
    from memprof.advice.simulated_advice import with_estimated_combination
    from memprof.analysis.headline import with_headline

    if not report.advice or any(row.basis != "estimated" for row in report.advice):
        report = with_headline(replace(report, advice=estimated_advice(report, analysis)))
    return with_estimated_combination(report, gpu, why, analysis)


def simulated(
    report: Report,
    gpu: str | None,
    seconds: float,
    workers: int | None = None,
    use_cache: bool = True,
    analysis: Views | None = None,
) -> Report:
    """Return the report with its advice simulated for at most ``seconds``; a note says why if it cannot be."""
    from memprof.advice.simulated_advice import with_simulated_advice
    from memprof.analysis.headline import with_headline
    from memprof.cli.progress import progress
    from memprof.plan.cache import cache_folder

    with progress() as told:
        found = with_simulated_advice(
            report, cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers, use_cache=use_cache,
            progress=told, analysis=analysis,
        )  # fmt: skip
    return with_headline(found)
