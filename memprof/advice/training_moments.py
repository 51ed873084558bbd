"""What a training pass holds beside what stands, at the moments of it that can be highest: reckoned from sizes.

A decoder layer's tensors are counted one by one, as transformers' Llama-like layers make them under autocast (RMSNorm
computes in float32 and keeps its input; a norm's weight keeps its normalised input if it is trained; a linear layer
keeps its input for its weight's gradient; SwiGLU keeps gate, its activation and up). Which of the moments is the
highest changes with the settings: without checkpointing it is the loss, with checkpointing and a full set of gradients
the first layer's backward, long after the loss.

Estimates take what was recorded and scale it by these, so that what is not counted here goes along with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.advice.recorded_run import DTYPE_BYTES, Effect, Peak, Run, Sizes, bounded
from memprof.config.settings import Settings

__all__ = ["TRANSIENT", "held", "kept_by_a_layer", "moments", "refined"]

# Categories whose bytes come and go within a pass.
TRANSIENT = ("activations", "activation_gradients", "loss_logits", "gradients", "weight_casts")
# Settings that these formulas follow.
_FOLLOWED = {
    "gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
    "num_generations", "completion_length", "prompt_length", "dtype", "lora_r", "lora_target_modules", "load_in_4bit",
    "recipe",
}  # fmt: skip


def kept_by_a_layer(s: Settings, z: Sizes) -> int:
    """Bytes a token that one decoder layer keeps for its backward without checkpointing."""
    stream, wide = DTYPE_BYTES[s.weights_dtype], _compute(s)
    hidden, inner, queries, keys = z.hidden, z.intermediate, z.heads * z.head_dim, z.kv_heads * z.head_dim
    norms = 2 * 4 * hidden + (0 if s.lora_r else 2 * stream * hidden)
    if _own_copies(s):  # q, k, v, gate and up each cast their input for themselves
        inputs = (5 * hidden + inner + (queries if s.lora_r else 0)) * wide
    else:  # one input for q, k and v, one for gate and up; attention's output is kept by attention
        inputs = (2 * hidden + inner) * wide
    shared = queries if s.padding == "worst" else keys  # masks rule the kernels out that share keys among queries
    attention = 2 * (queries + shared) * wide + 4 * z.heads
    if s.attn == "math":
        attention += 2 * z.heads * s.sequence_length * wide
    return norms + inputs + attention + 3 * inner * wide


def held(s: Settings, z: Sizes) -> int:
    """Activations between a micro-batch's forward and backward, in bytes."""
    tokens = s.per_device_train_batch_size * s.sequence_length
    if s.checkpointing == "none":
        return z.layers * tokens * kept_by_a_layer(s, z)
    boundaries = z.layers * tokens * z.hidden * DTYPE_BYTES[s.weights_dtype]
    if s.checkpointing == "offloaded":
        return 2 * boundaries // z.layers
    kept = tokens * z.layers * (z.heads * z.head_dim * _compute(s) + 4 * z.heads)
    return boundaries + (kept if s.checkpointing == "selective" else 0)


def moments(s: Settings, z: Sizes, loss: int) -> dict[str, dict[str, dict[str, int]]]:
    """By phase (forward, backward) and moment: bytes by category, of :data:`TRANSIENT`.

    Args:
        s: of the run; not sharded.
        z: of its model.
        loss: bytes of ``loss_logits`` where they are highest.
    """
    wide = _compute(s)
    tokens = s.per_device_train_batch_size * s.sequence_length
    kept, again = held(s, z), 0 if s.checkpointing == "none" else tokens * kept_by_a_layer(s, z)
    gradients, ends = _gradients(s, z)
    before = gradients if s.gradient_accumulation_steps > 1 else 0
    # All but the first layer's, of which the MLP's last product has its gradient.
    nearly = gradients - _unmade(s, z) + (before and ends)
    casts = _casts(s, z)
    one = casts if s.checkpointing == "none" or s.load_in_4bit else casts // z.layers
    out = tokens * _last_product(s, z)
    # A norm's gradients, in float32 and as they are handed on.
    norm = tokens * z.hidden * (4 + wide)
    # SwiGLU's: three of its width, beside the residual stream's (cast where products are narrower).
    stream = DTYPE_BYTES[s.weights_dtype]
    working = 3 * z.intermediate * wide + z.hidden * (stream if stream == wide else stream + wide)
    mlp = {"activation_gradients": tokens * working, "weight_casts": one}
    gone = tokens * z.intermediate * wide
    start = {"activations": kept, "gradients": before, "weight_casts": casts}
    passes = {"loss": {**start, "loss_logits": loss}}
    first = again or tokens * kept_by_a_layer(s, z)
    back = {
        "loss": {**start, "loss_logits": loss, "gradients": before + ends, "weight_casts": one},
        "last layer": {**mlp, "activations": kept + again - gone, "gradients": before + ends},
        "first layer": {**mlp, "activations": first - gone, "gradients": nearly},
        "embedding": {"gradients": gradients + ends},
    }
    if again:
        computed = {"activation_gradients": norm, "weight_casts": one, "gradients": before + ends}
        back["last layer, computed again"] = {**computed, "activations": kept + again + out}
    else:
        passes["last product"] = {**start, "activations": kept + out}
    return {"forward": passes, "backward": back}


def refined(effect: Effect, changes: Mapping[str, Any]) -> Effect:
    """An effect whose transient categories are reckoned with :func:`moments`, where they hold for the run."""

    def better(run: Run, peak: Peak) -> Mapping[str, int]:
        saved = dict(effect(run, peak))
        s, z = run.settings, run.sizes
        if s is None or z is None or peak.phase not in ("forward", "backward"):
            return saved
        if not z.layers or not _holds(s, changes):
            return saved
        loss = run.own_peaks.get("loss_logits", peak.of("loss_logits"))
        left = loss - min(loss, _share(saved.get("loss_logits", 0), peak.of("loss_logits"), loss))
        was = moments(s, z, loss)[peak.phase]
        now = moments(s.with_(**changes), z, left)[peak.phase]
        return saved if was == now else _least(peak, saved, was, now)

    return better


def _least(
    peak: Peak, saved: Mapping[str, int], was: Mapping[str, dict[str, int]], now: Mapping[str, dict[str, int]]
) -> Mapping[str, int]:
    """What the changed run's highest moment saves, from the moment that the recorded peak looks like."""
    standing = {name: n for name, n in saved.items() if name not in TRANSIENT}
    here = min(was.values(), key=lambda m: sum(abs(m.get(c, 0) - peak.of(c)) for c in TRANSIENT))
    recorded = sum(peak.of(c) for c in TRANSIENT)
    found = []
    for name, moment in now.items():
        scaled = _scaled(moment, here, peak)
        change = {c: peak.of(c) - scaled[c] for c in TRANSIENT}
        # No moment of the unchanged run was higher than its recorded peak, whatever the formulas say.
        change["activations"] += max(0, sum(_scaled(was.get(name, {}), here, peak).values()) - recorded)
        found.append({**standing, **change})
    return min(found, key=lambda each: sum(bounded(peak, each).values()))


def _scaled(moment: Mapping[str, int], here: Mapping[str, int], peak: Peak) -> dict[str, int]:
    """A moment's bytes, each category by what was recorded of it: what no formula counts goes along with the rest.

    Gradients pile up from layer to layer, so that what is not counted of them is added and not scaled.
    """
    found = {}
    for c in TRANSIENT:
        recorded, reckoned = peak.of(c), here.get(c, 0)
        scale = recorded / reckoned if reckoned and c != "gradients" else 1
        found[c] = round(moment.get(c, 0) * scale)
    found["gradients"] = max(0, found["gradients"] + peak.of("gradients") - here.get("gradients", 0))
    return found


def _holds(s: Settings, changes: Mapping[str, Any]) -> bool:
    whole = s.gpus == 1 or s.sharding == "ddp"
    after = changes.get("recipe", s.recipe)
    return whole and set(changes) <= _FOLLOWED and {s.recipe, after} <= {"trl", "trl-full-logits", "trl-0.14"}


def _share(saved: int, of: int, whole: int) -> int:
    """``saved`` bytes of ``of`` scaled to ``whole``."""
    return round(whole * saved / of) if of else 0


def _compute(s: Settings) -> int:
    return 2 if s.mixed_precision != "no" else DTYPE_BYTES[s.weights_dtype]


def _own_copies(s: Settings) -> bool:
    """Whether each linear layer casts its input for itself: from a float32 stream, or from an adapter's float32."""
    if s.mixed_precision == "no":
        return False
    return s.weights_dtype == "float32" or (s.lora_r is not None and not s.load_in_4bit)


def _gradients(s: Settings, z: Sizes) -> tuple[int, int]:
    """Of all trained parameters, and of one vocabulary-wide matrix in flight (the head's, or the embedding's)."""
    if s.lora_r is not None:
        return z.adapter_parameters(s.lora_r) * (2 if s.load_in_4bit else 4), 0
    wide = DTYPE_BYTES[s.weights_dtype]
    return z.parameters * wide, z.vocabulary * z.hidden * wide


def _unmade(s: Settings, z: Sizes) -> int:
    """Gradients of one layer but for its last product's, which backward makes first."""
    if s.lora_r is not None:
        return 0
    layer = (z.parameters - z.embeddings) // z.layers
    return (layer - z.hidden * z.intermediate) * DTYPE_BYTES[s.weights_dtype]


def _last_product(s: Settings, z: Sizes) -> int:
    """Bytes a token that a layer's last linear layer needs beside what is kept, while it runs.

    PEFT copies its input to the adapter's dtype, which autocast copies back (that copy is kept), and adds two outputs.
    """
    wide = _compute(s)
    if s.lora_r is None:
        return z.hidden * wide
    cast = z.intermediate * (wide + 4) if s.mixed_precision != "no" and not s.load_in_4bit else 0
    return cast + 2 * z.hidden * wide


def _casts(s: Settings, z: Sizes) -> int:
    """Autocast's copies of the layers' weights; of 4-bit ones the largest, which is unpacked while it is used."""
    if s.load_in_4bit:
        return 2 * z.hidden * z.intermediate
    if s.mixed_precision == "no" or s.weights_dtype != "float32":
        return 0
    return 2 * (z.parameters - z.embeddings)
