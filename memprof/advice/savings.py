"""Estimate what a change takes from each category, from recorded bytes.

Each function makes an effect: from a run and one phase's peak to bytes saved by category (below zero: added). Sources
of the shares are in the functions. Where a run's settings are known and it is not sharded, what comes and goes in
forward and backward is reckoned by :mod:`memprof.advice.training_moments` instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from memprof.advice.recorded_run import AdvisedRun, Effect, PhaseMaximum
from memprof.advice.training_moments import held, tokens_of
from memprof.config.optimizers import optimizer
from memprof.units import DTYPE_BYTES
from memprof.vocabulary import Category, Phase

# Phases that run micro-batches through the model.
_PASSES = {Phase.OLD_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.FORWARD, Phase.BACKWARD}
_TRAINING = (Phase.FORWARD, Phase.BACKWARD)
# Categories whose bytes follow the tokens of a micro-batch.
_BY_TOKEN = (Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.INPUTS)
# Of the activations kept for backward without checkpointing, what a checkpointed run of as many layers keeps, where
# the layers are not known: 2 of about 34 bytes a token and unit of width (Korthikanti et al. 2022, table 2, with an
# attention kernel that keeps no scores), and one layer of some tens.
_CHECKPOINTED = 0.10
# NF4 with a scale in float32 for each block of 64: bytes a parameter.
_NF4 = 0.5 + 4 / 64
# A tile of TRL's loss: 4096 tokens by 32768 entries of the vocabulary, float32.
_TILE_ROWS = 4096
_TILE = _TILE_ROWS * 32768 * 4


def all_of(*categories: Category) -> Effect:
    """Remove everything these categories hold, at any time."""
    return lambda run, peak: {category: peak.of(category) for category in categories}


def fewer_tokens(share: float, completions: float) -> Effect:
    """Run the same step with ``share`` of the tokens: training, log-probs and generation.

    ``completions`` is left of the completions' tokens, which are the ones that have logits.
    """

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        if peak.phase not in {*_PASSES, Phase.GENERATE}:
            return _lower(peak, (Category.INPUTS,), share)
        left = share if peak.phase == Phase.GENERATE else _logits(run, completions)
        return {**_lower(peak, (*_BY_TOKEN, Category.KV_CACHE), share), **_lower(peak, (Category.LOSS_LOGITS,), left)}

    return effect


def smaller_micro_batch(share: float) -> Effect:
    """Train ``share`` of the sequences at a time. Generation keeps its batch; gradients live from pass to pass."""

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        if peak.phase not in _PASSES:
            return {}
        saved = dict(_lower(peak, (Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS), share))
        saved |= _lower(peak, (Category.LOSS_LOGITS,), _logits(run, share))
        settings = run.settings
        if (
            settings is not None
            and settings.gradient_accumulation_steps == 1
            and peak.phase in (Phase.FORWARD, Phase.BACKWARD)
        ):
            # With one pass a step there were no gradients before its backward; from the second pass on there are.
            saved[Category.GRADIENTS] = peak.of(Category.GRADIENTS) - run.own_peaks.get(Category.GRADIENTS, 0)
        return saved

    return effect


def checkpointed(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Keep each layer's input only, and compute one layer at a time again."""
    if peak.phase not in (Phase.FORWARD, Phase.BACKWARD):
        return {}
    held = peak.of(Category.ACTIVATIONS)
    saved = {Category.ACTIVATIONS: round(held * (1 - _CHECKPOINTED))}
    if (shape := run.shape) is not None:
        saved[Category.ACTIVATIONS] = held - min(held, _boundaries(run) + held // max(shape.layers, 1))
        if peak.phase == Phase.BACKWARD:  # the copies are made again with each layer, not kept for backward
            saved[Category.WEIGHT_CASTS] = peak.of(Category.WEIGHT_CASTS) * (shape.layers - 1) // max(shape.layers, 1)
    return saved


def offloaded_boundaries(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Keep the layers' inputs in host memory, two of them on the device."""
    if peak.phase not in (Phase.FORWARD, Phase.BACKWARD) or run.shape is None:
        return {}
    boundaries = min(_boundaries(run), peak.of(Category.ACTIVATIONS))
    return {Category.ACTIVATIONS: boundaries - 2 * boundaries // max(run.shape.layers, 1)}


def _boundaries(run: AdvisedRun) -> int:
    """Return layers × tokens × width, in the weights' dtype: autocast leaves the residual stream alone."""
    settings, shape = run.settings, run.shape
    if settings is None or shape is None:
        return 0
    return shape.layers * tokens_of(settings) * shape.hidden * DTYPE_BYTES[settings.weights_dtype]


def low_rank(rank: int, nf4: bool = False) -> Effect:
    """Train an adapter only; ``nf4`` also keeps the linear layers in 4 bits."""

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        saved: dict[Category, int] = {}
        if run.settings is None or run.settings.lora_r is None:
            saved[Category.REFERENCE_MODEL] = peak.of(Category.REFERENCE_MODEL)
            saved[Category.TEMPORARIES] = peak.of(Category.TEMPORARIES)
            # PEFT's parameters are float32 over 16-bit weights too, and bfloat16 over 4-bit ones.
            size = _adapter_parameters(run, rank) * (2 if nf4 else 4)
            saved[Category.ADAPTERS] = -size
            if peak.of(Category.GRADIENTS):
                saved[Category.GRADIENTS] = peak.of(Category.GRADIENTS) - size
            if peak.of(Category.OPTIMIZER_STATE):
                saved[Category.OPTIMIZER_STATE] = peak.of(Category.OPTIMIZER_STATE) - 2 * size
        elif nf4 and not run.settings.load_in_4bit:  # the adapter becomes bfloat16 with its base in 4 bits
            saved |= _lower(peak, (Category.ADAPTERS, Category.GRADIENTS, Category.OPTIMIZER_STATE), 0.5)
        if nf4 and run.shape is not None and run.settings is not None:
            linear = run.shape.parameters - run.shape.embeddings
            wide = DTYPE_BYTES[run.settings.weights_dtype]
            # The rest is bfloat16, whatever it was: QLoRA's usual compute type.
            saved[Category.WEIGHTS] = round(linear * (wide - _NF4) + run.shape.embeddings * (wide - 2))
            saved[Category.WEIGHT_CASTS] = round(peak.of(Category.WEIGHT_CASTS) * (1 - 2 / max(run.shape.layers, 1)))
            saved[Category.ACTIVATIONS] = _narrower_stream(run, peak)
        return saved

    return effect


def _adapter_parameters(run: AdvisedRun, rank: int) -> int:
    """Count an adapter's parameters: a hundredth of the model's where its shape is not known."""
    if run.shape is not None:
        return run.shape.adapter_parameters(rank)
    wide = 4 if run.settings is None else DTYPE_BYTES[run.settings.weights_dtype]
    return max(p.of(Category.WEIGHTS) for p in run.peaks) // (100 * wide)


def half_precision(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Keep weights in bfloat16, not float32: half of them, of gradients, moments and reference; no casts are left.

    The residual stream halves too; with checkpointing, that is most of the activations.
    """
    saved = dict(
        _lower(peak, (Category.WEIGHTS, Category.GRADIENTS, Category.REFERENCE_MODEL, Category.TEMPORARIES), 0.5)
    )
    settings = run.settings
    if settings is not None and settings.has_adapter:  # PEFT keeps its own parameters in float32
        saved |= {Category.GRADIENTS: 0, Category.TEMPORARIES: 0}
    elif settings is None or optimizer(settings.optim).bits is None:  # moments are as wide as the parameters
        saved[Category.OPTIMIZER_STATE] = peak.of(Category.OPTIMIZER_STATE) // 2
    saved[Category.WEIGHT_CASTS] = peak.of(Category.WEIGHT_CASTS)
    return {**saved, Category.ACTIVATIONS: _narrower_stream(run, peak)}


def _narrower_stream(run: AdvisedRun, peak: PhaseMaximum) -> int:
    """Return what activations give back when the residual stream is bfloat16 instead of float32."""
    settings, shape = run.settings, run.shape
    if settings is None or shape is None or settings.weights_dtype != "float32" or peak.phase not in _TRAINING:
        return 0
    return max(
        0, min(held(settings, shape), peak.of(Category.ACTIVATIONS)) - held(settings.with_(dtype="bfloat16"), shape)
    )


def coarser_state(optim: str) -> Effect:
    """Keep Adam's two moments in few bits (and scales), those of embeddings as they were; or paged, off the device.

    Bitsandbytes' layout, which the simulator's closed-form tests hold too (docs/simulation-reference.md).
    """
    row = optimizer(optim)
    each = round(row.state_bytes(2**16, 4) / 2**16, 2)  # bytes a parameter

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        state = peak.of(Category.OPTIMIZER_STATE)
        if row.paged:
            return {Category.OPTIMIZER_STATE: state, Category.TEMPORARIES: _foreach(run, peak)}
        wide = 4 if run.settings is None else DTYPE_BYTES[run.settings.weights_dtype]
        left = state * each / (2 * wide)
        if run.shape is not None and (run.settings is None or not run.settings.has_adapter):
            share = min(1.0, run.shape.vocabulary * run.shape.hidden / max(run.shape.parameters, 1))
            left += share * (state * 8 / (2 * wide) - left)
        return {Category.OPTIMIZER_STATE: round(state - left), Category.TEMPORARIES: _foreach(run, peak)}

    return effect


def fused(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Remove the scratch of the optimizer's step."""
    return {Category.TEMPORARIES: _foreach(run, peak)}


def _foreach(run: AdvisedRun, peak: PhaseMaximum) -> int:
    """Return the scratch of a foreach step, which keeps a set of parameters' worth of it; others do not."""
    slow = run.settings is not None and optimizer(run.settings.optim).foreach
    return peak.of(Category.TEMPORARIES) if slow and peak.phase == Phase.OPTIMIZER_STEP else 0


def tiled_logits(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Make logits a tile at a time instead of [batch, tokens, vocabulary]: some tiles are left."""
    return {Category.LOSS_LOGITS: max(0, peak.of(Category.LOSS_LOGITS) - 3 * _TILE)} if peak.phase in _PASSES else {}


def generated_elsewhere(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Generate in another process: no cache and no forward of the rollout here."""
    if peak.phase != Phase.GENERATE:
        return {Category.INFERENCE_ENGINE: peak.of(Category.INFERENCE_ENGINE)}
    return {
        c: peak.of(c)
        for c in (
            Category.KV_CACHE,
            Category.ACTIVATIONS,
            Category.LOSS_LOGITS,
            Category.INFERENCE_ENGINE,
            Category.WEIGHT_CASTS,
        )
    }


def generated_less(share: float) -> Effect:
    """Generate ``share`` of the sequences at a time; fewer wait for training."""

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        names = (
            (Category.KV_CACHE, Category.ACTIVATIONS, Category.LOSS_LOGITS, Category.INPUTS)
            if peak.phase == Phase.GENERATE
            else (Category.INPUTS,)
        )
        return _lower(peak, names, share)

    return effect


def generated_together(share: float) -> Effect:
    """Keep ``share`` of the sequences in the cache at a time; what was generated waits as before."""

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        names = (Category.KV_CACHE, Category.ACTIVATIONS, Category.LOSS_LOGITS)
        return _lower(peak, names, share) if peak.phase == Phase.GENERATE else {}

    return effect


def quantized_cache(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Keep half a byte for two, and a scale and a shift of two bytes each for 64 values; one layer is unpacked."""
    if peak.phase != Phase.GENERATE:
        return {}
    held = peak.of(Category.KV_CACHE)
    layers = run.shape.layers if run.shape is not None else 1
    return {Category.KV_CACHE: round(held * (1 - (0.5 + 4 / 64) / 2 - 1 / max(layers, 1)))}


def asleep(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Give the engine's memory back outside generation."""
    return {} if peak.phase == Phase.GENERATE else {Category.INFERENCE_ENGINE: peak.of(Category.INFERENCE_ENGINE)}


def smaller_engine(share: float) -> Effect:
    """Give the engine ``share`` of the memory it had."""
    return lambda run, peak: _lower(peak, (Category.INFERENCE_ENGINE,), share)


def divided(ranks: int) -> Effect:
    """Divide weights, gradients and moments by the ranks; buckets go away, and one layer at a time is whole."""

    def effect(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
        names = (
            Category.WEIGHTS,
            Category.GRADIENTS,
            Category.OPTIMIZER_STATE,
            Category.REFERENCE_MODEL,
            Category.TEMPORARIES,
        )
        saved = dict(_lower(peak, names, 1 / ranks))
        layers = run.shape.layers if run.shape is not None else 1
        saved[Category.WEIGHTS] -= (
            2 * peak.of(Category.WEIGHTS) // max(layers, 1) if layers > 1 else saved[Category.WEIGHTS]
        )
        return {**saved, Category.COMMUNICATION: peak.of(Category.COMMUNICATION)}

    return effect


def without_masks(run: AdvisedRun, peak: PhaseMaximum) -> Mapping[Category, int]:
    """Remove the [batch, 1, tokens, tokens] mask, and the scores where they are materialised."""
    settings, shape = run.settings, run.shape
    if settings is None or shape is None or peak.phase not in _PASSES:
        return {}
    square = settings.per_device_train_batch_size * settings.sequence_length**2
    if settings.attn != "math":
        return {Category.ACTIVATIONS: 2 * square}
    kept = 1 if settings.gradient_checkpointing not in (False, "none") else shape.layers
    return {Category.ACTIVATIONS: min(square * shape.heads * 2 * 2 * kept, peak.of(Category.ACTIVATIONS))}


def _logits(run: AdvisedRun, share: float) -> float:
    """Return the share of logits that is left: the tokens', where logits are materialised or fill no tile."""
    settings = run.settings
    if settings is None or settings.recipe not in ("trl", "lean") or settings.trainer == "dpo":
        return share
    if settings.trainer == "sft":  # TRL's loss takes a fixed piece of the tokens at a time
        return 1.0
    tokens = settings.per_device_train_batch_size * settings.completion_length
    return min(tokens * share, _TILE_ROWS) / min(tokens, _TILE_ROWS)


def _lower(peak: PhaseMaximum, names: tuple[Category, ...], share: float) -> Mapping[Category, int]:
    return {name: round(peak.of(name) * (1 - share)) for name in names}
