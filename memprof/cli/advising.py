"""Find advice by simulating: what ``memprof advise`` and ``memprof report --advise`` share."""

from __future__ import annotations

from memprof.analysis.headline import with_headline
from memprof.report import Report
from memprof.report.codec import from_builtins, to_builtins


def check_card(gpu: str | None) -> None:
    """Refuse (UsageError) a GPU that is neither a known name nor a size, before anything is read."""
    if gpu is not None:
        from memprof.config.gpus import find_gpu

        find_gpu(gpu)


def estimated(report: Report, gpu: str | None = None, why: str = "") -> Report:
    """Return the report with its advice estimated from recorded sizes, whatever advice it had; ``gpu`` is the GPU that
    the run is to fit, ``why`` says in the report's notes why nothing is simulated."""
    from memprof.advice.estimate import estimated_advice
    from memprof.advice.simulated_advice import estimated_parts

    plain = to_builtins(report)
    plain |= {"advice": estimated_advice(plain), **estimated_parts(plain, gpu, why)}
    return from_builtins(with_headline(plain), Report)


def simulated(
    report: Report, gpu: str | None, seconds: float, workers: int | None = None, use_cache: bool = True
) -> Report:
    """Return the report with its advice simulated for at most ``seconds``; a note says why if it cannot be."""
    from memprof.advice.simulated_advice import simulated_parts
    from memprof.cli.progress import progress
    from memprof.plan.cache import cache_folder

    plain = to_builtins(report)
    with progress() as told:
        plain |= simulated_parts(
            plain, cache_folder() / "models", gpu=gpu, seconds=seconds, workers=workers, use_cache=use_cache,
            progress=told,
        )  # fmt: skip
    return from_builtins(with_headline(plain), Report)


def fits_asked_card(report: Report) -> bool:
    """Tell whether changes that make the run fit ``--gpu`` were found; True without ``--gpu``."""
    return report.combination is None or report.combination.fits
