"""List the changes that the categories alone suggest, for runs that do not say how they were configured.

What the largest allocations' stacks show is used: the lines that made them, and the framework, whose own words for its
settings are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memprof.advice import effects
from memprof.advice.candidate import Candidate, Toll
from memprof.advice.recorded_run import Effect, Peak, Run
from memprof.config.to_grpo import adapter_text
from memprof.oom.frameworks import PLAIN
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS

__all__ = ["RANK", "an_adapter", "candidates_by_category"]

#: Of adapters that are proposed.
RANK = 16
# A category is worth a change of its own from this share of the peak on.
_LARGE = 0.1
# So much of the activations is never freed where autograd keeps them; a forward without gradients keeps one layer's.
_MOST = 0.5
_TRANSIENT = 0.1
_MADE = ("activations", "activation_gradients", "loss_logits", "temporaries")
_LABELS = {str(category): label.lower() for category, label in CATEGORY_LABELS.items()}


def candidates_by_category(run: Run) -> Iterator[Candidate]:
    """List changes by the categories alone, where the file does not say how the run was configured."""
    yield from _less_cache(run)
    yield from _without_gradients(run)
    yield from _less_made(run)
    yield from _less_kept(run)
    yield from _less_state(run)
    yield from _smaller_weights(run)


def an_adapter() -> Candidate:
    """Return the change from training all weights to training an adapter, without settings to simulate it."""
    return Candidate(
        id="lora",
        action=f"Train a LoRA adapter of rank {RANK} instead of all weights",
        setting=adapter_text(RANK),
        costs="Not slower. Another kind of training: fewer degrees of freedom, and a learning rate about ten times "
        "higher.",
        exact=False,
        toll=Toll.TRAINED,
        effect=effects.low_rank(RANK),
    )


def _trains(run: Run) -> bool:
    kept = run.details.get("activations", {})
    return run.own_peaks.get("gradients", 0) > 0 or kept.get("saved", 0) > 0.5 * run.peak.of("activations")


def _less_cache(run: Run) -> Iterator[Candidate]:
    """A pool of keys and values is an engine's share of the card; a cache without an engine follows the batch."""
    cache = run.peak.of("kv_cache")
    if cache < _LARGE * run.peak.bytes:
        return
    names = run.names
    if run.engine and names.share:
        longest = f"; or lower {names.model_len}, so that a smaller pool is enough" if names.model_len else ""
        yield Candidate(
            id="engine_share",
            action=f"Give the engine's pool of keys and values two thirds of its {format_gib(cache)} GiB",
            setting=f"lower {names.share}{longest}",
            costs="Fewer sequences are generated at a time: slower where they no longer fit the pool.",
            exact=True,
            toll=Toll.SLOWER,
            effect=lambda run, peak: {"kv_cache": peak.of("kv_cache") // 3},
        )
        if names.sleep and run.peak.phase not in ("generate", "load"):
            yield Candidate(
                id="engine_sleep",
                action="Let the engine sleep while the policy trains",
                setting=names.sleep,
                costs="Waking it takes some seconds for large models. Not together with expandable_segments.",
                exact=True,
                toll=Toll.SLOWER,
                effect=effects.asleep,
            )
        return
    yield Candidate(
        id="fewer_sequences",
        action="Generate half as many sequences at a time",
        setting=names.rollout or "halve the batch that generate() is given",
        costs="Slower generation: each token's weights are read for fewer sequences.",
        exact=True,
        toll=Toll.SLOWER,
        effect=lambda run, peak: {"kv_cache": peak.of("kv_cache") // 2},
    )


def _less_made(run: Run) -> Iterator[Candidate]:
    """Name the lines that make most of what comes and goes."""
    category = max(_MADE, key=run.peak.of)
    whole = run.peak.of(category)
    made = run.made.get(category, ())
    if whole < _LARGE * run.peak.bytes or not made:
        return
    chosen = made[:1] if made[0].bytes > 0.7 * whole or len(made) == 1 else made[:2]
    held = min(whole, sum(place.bytes for place in chosen))
    if held < _LARGE * run.peak.bytes:
        return
    where = " and ".join(place.site for place in chosen)
    saved = "Checkpoint it" if _trains(run) and category == "activations" else "Do it in chunks"
    yield Candidate(
        id="made_here",
        action=f"Halve what {where} make{'s' if len(chosen) == 1 else ''}: {format_gib(held)} GiB of "
        f"{_LABELS[category]}",
        setting=f"{saved.lower()} there, or halve the batch or the length it sees",
        costs="As many sums, in two passes; a checkpoint computes it once more. The estimate takes half to stay.",
        exact=True,
        toll=Toll.SLOWER,
        effect=_half_of(category, held / whole),
    )


def _without_gradients(run: Run) -> Iterator[Candidate]:
    """Where forwards end without a backward and what they made is never freed, autograd may hold it for nothing."""
    kept = run.lasting.get("activations", 0.0)
    if {p.phase for p in run.peaks} & {"backward", "optimizer_step"} or run.own_peaks.get("gradients", 0):
        return
    if run.failed or kept < _MOST or run.peak.of("activations") < _LARGE * run.peak.bytes:
        return
    yield Candidate(
        id="no_grad",
        action="Run the forward without gradients: the recording shows no backward, yet each layer's activations stay",
        setting="with torch.inference_mode(): ...  # if a backward follows after all: " + run.names.checkpointing,
        costs="Faster. Not possible where a backward follows: checkpoint the layers there. The estimate takes a tenth "
        "to stay.",
        exact=True,
        toll=Toll.NOTHING,
        effect=lambda run, peak: {"activations": round(peak.of("activations") * kept * (1 - _TRANSIENT))},
    )


def _half_of(category: str, share: float) -> Effect:
    def effect(run: Run, peak: Peak) -> Mapping[str, int]:
        return {category: round(peak.of(category) * share / 2)}

    return effect


def _less_kept(run: Run) -> Iterator[Candidate]:
    peak = run.peak
    kept, training = run.details.get("activations", {}), _trains(run)
    if training and (peak.of("activations") or peak.of("loss_logits")):
        yield Candidate(
            id="micro_batch_half",
            action=f"Train half as many {'sequences' if run.names.framework else 'samples'} at a time",
            setting=run.names.micro_batch,
            costs="The same tokens in twice as many passes: slower only where a pass no longer fills the GPU."
            + (" Batch normalisation then sees half a batch." if run.over_batches else ""),
            exact=not run.over_batches,
            toll=Toll.SLOWER,
            effect=effects.smaller_micro_batch(0.5),
        )
    if training and not kept.get("boundary", 0) and peak.of("activations"):
        yield Candidate(
            id="checkpointing",
            action="Turn gradient checkpointing on",
            setting=run.names.checkpointing,
            costs="Every layer's forward runs once more in backward: 20 to 30 % longer training passes. The estimate "
            "takes a tenth of the activations to stay.",
            exact=True,
            toll=Toll.SLOWER,
            effect=effects.checkpointed,
        )


def _less_state(run: Run) -> Iterator[Candidate]:
    peak, trained = run.peak, run.own_peaks.get("gradients", 0)
    if trained and peak.of("optimizer_state") > 1.5 * trained:
        yield Candidate(
            id="adamw_8bit",
            action="Keep Adam's two moments in 8 bits",
            setting=run.names.optimizer or "an 8-bit optimizer (bitsandbytes AdamW8bit)",
            costs="Gradients stay, updates are coarser; as fast.",
            exact=False,
            toll=Toll.ROUNDED,
            effect=effects.coarser_state("adamw_8bit"),
        )
    if trained > 0.5 * peak.of("weights") > 0 and not peak.of("adapters"):
        yield an_adapter()


def _smaller_weights(run: Run) -> Iterator[Candidate]:
    """Where nothing is trained, weights can be held in fewer bits."""
    if run.peak.of("weights") < 0.5 * run.peak.bytes or _trains(run):
        return
    yield Candidate(
        id="smaller_weights",
        action="Hold the weights in half the bytes: in bfloat16 if they are float32, in 8 bits if they have 16",
        setting=run.names.weights or PLAIN.weights,
        costs="Weights are rounded; those in 8 bits are unpacked when they are used, which is slower.",
        exact=False,
        toll=Toll.ROUNDED,
        effect=lambda run, peak: {"weights": peak.of("weights") // 2},
    )
