"""List the changes worth considering for a run: when each applies, which settings it sets, what it saves.

:mod:`memprof.advice.by_settings` has those for a run whose settings are known, :mod:`memprof.advice.report_only` those
that a report alone suggests. Changes to the allocator's settings are listed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from memprof.advice.candidate import Candidate, proposed
from memprof.advice.recorded_run import AdvisedRun
from memprof.advice.report_only import candidates_by_category, candidates_by_findings, is_open
from memprof.vocabulary import EXPANDABLE_SEGMENTS


def candidates_for(run: AdvisedRun) -> list[Candidate]:
    """List every change that applies to a run, whatever it saves."""
    if run.settings is None:
        found = [*candidates_by_category(run)]
    else:
        # Most recordings have no settings.
        from memprof.advice.by_settings import candidates_by_settings

        found = candidates_by_settings(run.settings)
    return [*candidates_by_findings(run), *found, *fragmentation_candidates(run)]


def fragmentation_candidates(run: AdvisedRun) -> Iterator[Candidate]:
    """List changes to the allocator, where memory lies idle between blocks in use: about the device's peak."""
    sleeps = run.settings is not None and run.settings.generation == "vllm" and run.settings.engine_sleeps
    if run.idle_bytes <= 0 or sleeps or not is_open("expandable_segments", run):
        return
    changes = _allocator(run, "expandable_segments:True")
    segments, refused = EXPANDABLE_SEGMENTS, _refused(run)
    yield proposed("expandable_segments", changes, lambda run, peak: {}, segments=segments, refused=refused)
    if run.settings is not None and "max_split_size_mb" not in run.alloc_conf:
        yield proposed("max_split_size", _allocator(run, "max_split_size_mb:512"))


def _refused(run: AdvisedRun) -> str:
    """Say where growing segments are refused: sleeping engines map and unmap their memory themselves."""
    generates = run.settings is not None and run.settings.generation == "vllm"
    if not (run.engine or generates or run.names.framework in ("vLLM", "SGLang")):
        return ""
    return "Not supported with vLLM's sleep mode or torch_memory_saver."


def _allocator(run: AdvisedRun, more: str) -> dict[str, str]:
    """Add one setting for the allocator; nothing where the run cannot be simulated."""
    if run.settings is None:
        return {}
    return {"alloc_conf": ",".join(part for part in (run.alloc_conf, more) if part)}
