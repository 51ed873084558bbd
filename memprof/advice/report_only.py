"""List the changes that a report alone suggests: by its findings, and by its categories where it names no settings.

This module decides when a change applies and what it saves. ``memprof/oom/knowledge`` has its words, and says which
frameworks can make it: they are the remedies that a text's explanation ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memprof.advice import savings as effects
from memprof.advice.candidate import Candidate, CostRank
from memprof.advice.recorded_run import AdvisedRun, Effect, PhaseMaximum
from memprof.analysis.allocations.places import without_folders
from memprof.oom.facts import FailureFacts
from memprof.oom.framework_settings import PLAIN, Names, frameworks
from memprof.oom.remedies import change, possible, remedy
from memprof.report.allocations import Finding
from memprof.vocabulary import CATEGORY_LABELS, Category, Phase

#: The rank of adapters that are proposed.
RANK = 16
# A category is worth a change of its own from this share of the peak on.
_LARGE = 0.1
# So much of the activations is never freed where autograd keeps them; a forward without gradients keeps one layer's.
_MOST = 0.5
_TRANSIENT = 0.1
# A step's scratch is worth a change from this share of the peak on.
_SCRATCH = 0.05
_FOREACH = re.compile(r" _(?:multi_tensor|foreach)_\w+$")
# Of logits that are computed in chunks, forward and backward, at least two chunks of eight stay.
_CHUNKS_LEFT = 0.25
_MADE = (Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS, Category.TEMPORARIES)
_LABELS = {category: label.lower() for category, label in CATEGORY_LABELS.items()}


def candidates_by_category(run: AdvisedRun) -> Iterator[Candidate]:
    """List changes by the categories alone, where the file does not say how the run was configured."""
    for make in (
        _less_cache, _without_gradients, _without_scratch, _less_made, _less_kept, _less_state, _smaller_weights
    ):  # fmt: skip
        yield from (candidate for candidate in make(run) if candidate is not None)


def candidates_by_findings(run: AdvisedRun) -> Iterator[Candidate]:
    """List a change for each finding of a report (see :mod:`memprof.analysis.peaks.findings`)."""
    for found in run.findings:
        one = found.kind == "left_over" and found.passes == 1
        name = found.kind if one or found.kind != "left_over" else "kept_by_passes"
        where = without_folders(found.frame) or None
        own = without_folders(found.held_at or "")
        line = own if own and own != where else None
        twice = found.kind == "two_copies" and where
        scope = _scope(run, found.bytes, where=where, passes=found.passes, line=line, copying=_copying(run))
        if candidate := _candidate("made_twice" if twice else name, scope, _without(found)):
            yield replace(candidate, id=name)


def _copying(run: AdvisedRun) -> str | None:
    return 'load with map_location="cpu"; del the state_dict; no deepcopy on the device' if run.copies else None


def _without(found: Finding) -> Effect:
    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        # No moment of any phase is higher than what is left of the highest.
        return {found.category: max(0, peak.bytes - run.peak.bytes + found.saves_bytes)}

    return effect


def is_open(name: str, run: AdvisedRun) -> bool:
    """Tell whether a remedy applies to the framework whose frames were seen, and is not refused there."""
    return possible(remedy(name), _scope(run))


def an_adapter() -> Candidate:
    """Return the change from training all weights to training an adapter, in TRL's words, without settings."""
    trl = next(names for names in frameworks() if names.framework == "TRL")
    found = _candidate("lora", _scope_of(trl, Phase.OTHER, True), effects.low_rank(RANK))
    assert found is not None
    return found


def _scope(run: AdvisedRun, held: int = 0, **more: Any) -> FailureFacts:
    return _scope_of(run.names, run.peak.phase, _trains(run), run.alloc_conf, held=held, **more)


def _scope_of(names: Names, phase: Phase, training: bool, alloc_conf: str = "", **more: Any) -> FailureFacts:
    """Return what a recording tells a change; a setting that the framework has no word for is unknown.

    Args:
        names: the framework whose files the stacks show. An engine's settings say nothing of a training beside it.
        training: gradients were seen.
        more: what the change's own words ask for, such as ``held``, the bytes that it is about.
    """
    words = dict(names.words)
    if names.kind == "serving":  # its word for checkpointing is about graphs
        words = {**words, **PLAIN.words} if training else {k: v for k, v in words.items() if k != "checkpointing"}
    values = {
        **{f"setting_{word}": text for word, text in words.items()},
        "backend": "CUDA",
        "framework": names.framework or None,
        "phase": str(phase),
        "training": training,
        "serving": names.kind == "serving" and not training,
        "images": names.kind == "images",
        "loading": phase == Phase.LOAD,
        "sleeping_engine": names.sleeps,
        "torch": None,
        "torch_at_most": None,
        **more,
    }
    return FailureFacts(values, around=alloc_conf)


def _candidate(name: str, scope: FailureFacts, effect: Effect) -> Candidate | None:
    """Return a change in the words of the run's framework; None where it has no such setting."""
    found = change(name, scope)
    if found is None:
        return None
    rank = getattr(CostRank, found.cost_rank)
    return Candidate(name, found.action, found.costs, found.exact, rank, setting=found.setting, effect=effect)


def _trains(run: AdvisedRun) -> bool:
    kept = run.details.get(Category.ACTIVATIONS, {})
    return run.own_peaks.get(Category.GRADIENTS, 0) > 0 or kept.get("saved", 0) > 0.5 * run.peak.of(
        Category.ACTIVATIONS
    )


def _less_cache(run: AdvisedRun) -> Iterator[Candidate | None]:
    """Suggest a smaller cache: an engine's pool is a share of the card, a cache without an engine follows the batch."""
    cache = run.peak.of(Category.KV_CACHE)
    if cache < _LARGE * run.peak.bytes:
        return
    scope = _scope(run, cache)
    share = _candidate("engine_share", scope, _part_of(Category.KV_CACHE, 1 / 3)) if run.engine else None
    yield share or _candidate("fewer_sequences", scope, _part_of(Category.KV_CACHE, 1 / 2))
    if share and run.peak.phase not in (Phase.GENERATE, Phase.LOAD):
        yield _candidate("engine_sleep", scope, effects.asleep)


def _without_scratch(run: AdvisedRun) -> Iterator[Candidate | None]:
    """Suggest a step without the scratch of torch's foreach optimizers, which is as large as the parameters."""
    made = sum(place.bytes for place in run.made.get(Category.TEMPORARIES, ()) if _FOREACH.search(place.site))
    if run.peak.phase != Phase.OPTIMIZER_STEP or made < _SCRATCH * run.peak.bytes:
        return

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        return {Category.TEMPORARIES: made} if peak.phase == Phase.OPTIMIZER_STEP else {}

    yield _candidate("fused_step", _scope(run, made), effect)


def _less_made(run: AdvisedRun) -> Iterator[Candidate | None]:
    """Name the lines that make most of what comes and goes."""
    # An optimizer's scratch is as large as the parameters, whatever the batch.
    stepping = run.peak.phase == Phase.OPTIMIZER_STEP
    category = max((c for c in _MADE if not (stepping and c == Category.TEMPORARIES)), key=run.peak.of)
    whole = run.peak.of(category)
    made = run.made.get(category, ())
    if whole < _LARGE * run.peak.bytes or not made:
        return
    chosen = made[:1] if made[0].bytes > 0.7 * whole or len(made) == 1 else made[:2]
    held = min(whole, sum(place.bytes for place in chosen))
    if held < _LARGE * run.peak.bytes:
        return
    once_more = _trains(run) and category == Category.ACTIVATIONS
    scope = _scope(
        run, held,
        where=" and ".join(place.site for place in chosen),
        what=_LABELS[category],
        how="checkpoint it" if once_more else "process it in chunks",
    )  # fmt: skip
    yield _candidate("made_here", scope, _part_of(category, held / whole / 2))


def _without_gradients(run: AdvisedRun) -> Iterator[Candidate | None]:
    """Find forwards that end without a backward and never free what they made: autograd may hold it for nothing."""
    # Rebinding a name frees a pass's graph when the next has returned: until then both are there.
    outlive = run.details.get(Category.ACTIVATIONS, {}).get("kept", 0) / max(1, run.peak.of(Category.ACTIVATIONS))
    kept = max(run.lasting.get(Category.ACTIVATIONS, 0.0), outlive)
    if {p.phase for p in run.peaks} & {Phase.BACKWARD, Phase.OPTIMIZER_STEP} or run.own_peaks.get(
        Category.GRADIENTS, 0
    ):
        return
    if run.failed or kept < _MOST or run.peak.of(Category.ACTIVATIONS) < _LARGE * run.peak.bytes:
        return
    # Autocast keeps its copies until its block ends, also where nothing is kept for backward.
    casts = run.lasting.get(Category.WEIGHT_CASTS, 0.0)
    copies = casts >= _MOST and run.peak.of(Category.WEIGHT_CASTS) >= _LARGE * run.peak.bytes
    scope = _scope(
        run,
        kept="each layer's activations and autocast's copies of the weights" if copies else "each layer's activations",
        autocast="autocast without its cache" if copies else None,
        alone="which frees activations alone" if copies else None,
        cacheless='torch.autocast("cuda", torch.bfloat16, cache_enabled=False)' if copies else None,
    )  # fmt: skip

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        shares = {Category.ACTIVATIONS: kept, Category.WEIGHT_CASTS: casts if copies else 0.0}
        return {category: round(peak.of(category) * share * (1 - _TRANSIENT)) for category, share in shares.items()}

    if run.only_infers:
        yield _candidate("no_grad", scope, effect)
    elif either := _candidate("no_grad_or_checkpointing", scope, effect):
        yield replace(either, id="no_grad")


def _part_of(category: Category, share: float) -> Effect:
    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        return {category: round(peak.of(category) * share)}

    return effect


def _less_kept(run: AdvisedRun) -> Iterator[Candidate | None]:
    peak = run.peak
    if not _trains(run):
        return
    if peak.of(Category.ACTIVATIONS) or peak.of(Category.LOSS_LOGITS):
        units = "sequences" if run.names.framework else "samples"
        batches = "Batch normalisation then sees half a batch." if run.over_batches else None
        half = _candidate(
            "micro_batch_half", _scope(run, units=units, batches=batches), effects.smaller_micro_batch(0.5)
        )
        yield half and replace(half, exact=not run.over_batches)
    if peak.of(Category.LOSS_LOGITS) > _LARGE * peak.bytes:
        yield _candidate("chunked_logits", _scope(run), _part_of(Category.LOSS_LOGITS, 1 - _CHUNKS_LEFT))
    if peak.of(Category.ACTIVATIONS) and not run.details.get(Category.ACTIVATIONS, {}).get("boundary", 0):
        yield _candidate("checkpointing", _scope(run), effects.checkpointed)


def _less_state(run: AdvisedRun) -> Iterator[Candidate | None]:
    peak, trained = run.peak, run.own_peaks.get(Category.GRADIENTS, 0)
    if trained and peak.of(Category.OPTIMIZER_STATE) > 1.5 * trained:
        yield _candidate("adamw_8bit", _scope(run), effects.coarser_state("adamw_8bit"))
    # Batch norms tell a convolutional network, which is trained whole.
    whole = trained > 0.5 * peak.of(Category.WEIGHTS) > 0 and not peak.of(Category.ADAPTERS)
    if whole and not run.over_batches and run.has_linear_layers:
        yield _candidate("lora", _scope(run), effects.low_rank(RANK))


def _smaller_weights(run: AdvisedRun) -> Iterator[Candidate | None]:
    """Suggest weights in fewer bits where nothing is trained."""
    if run.peak.of(Category.WEIGHTS) >= 0.5 * run.peak.bytes and not _trains(run):
        bits, words = run.weights_bits, run.names.words
        half, setting = words.get("half", ""), words.get("weights", "")
        then = float(words.get("weights_bits", 8))
        if bits == 32 and (half or "bfloat16" in setting):
            narrow, share = "bfloat16 instead of float32", 1 / 2
            setting = half or setting
        elif bits or (then < 8 and "bfloat16" not in setting):
            setting = setting.removeprefix(f"{half}, or ") if half else setting
            narrow = f"{int(then)} bits instead of {bits}" if bits else f"{int(then)} bits"
            share = 1 - then / (bits or 16)
        else:
            narrow, share = None, 1 / 2
        scope = _scope(run, narrow=narrow, setting_weights=setting or None)
        yield _candidate("smaller_weights", scope, _part_of(Category.WEIGHTS, share))
