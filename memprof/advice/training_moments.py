"""Compute what comes and goes in a training pass, at the moments that can be its highest, from a model's shape.

A decoder layer's tensors are counted one by one, as transformers' Llama-like layers make them under autocast (RMSNorm
computes in float32 and keeps its input; a norm's weight keeps its normalised input if it is trained; a linear layer
keeps its input for its weight's gradient; SwiGLU keeps gate, its activation and up). Which of the moments is the
highest changes with the settings: without checkpointing it is the loss, with checkpointing and a full set of gradients
the first layer's backward, long after the loss.

Estimates take what was recorded and scale it by these, so that what is not counted here goes along with the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.units import DTYPE_BYTES
from memprof.vocabulary import Category, Phase

if TYPE_CHECKING:
    from memprof.config.model_shape import ModelShape
    from memprof.config.settings import Settings, TrainerSettings

# Categories whose bytes come and go within a pass.
TRANSIENT = (
    Category.ACTIVATIONS,
    Category.ACTIVATION_GRADIENTS,
    Category.LOSS_LOGITS,
    Category.GRADIENTS,
    Category.WEIGHT_CASTS,
)


def kept_by_a_layer(s: Settings, m: ModelShape) -> int:
    """Return the bytes a token that one decoder layer keeps for its backward without checkpointing."""
    stream, wide = DTYPE_BYTES[s.weights_dtype], _compute(s)
    hidden, inner, queries, keys = m.hidden, m.intermediate, m.heads * m.head_dim, m.kv_heads * m.head_dim
    norms = 2 * 4 * hidden + (0 if s.has_adapter else 2 * stream * hidden)
    if _own_copies(s):  # q, k, v, gate and up each cast their input for themselves
        inputs = (5 * hidden + inner + (queries if s.lora_r else 0)) * wide
    else:  # one input for q, k and v, one for gate and up; attention's output is kept by attention
        inputs = (2 * hidden + inner) * wide
    shared = queries if s.padding == "worst" else keys  # masks rule the kernels out that share keys among queries
    attention = 2 * (queries + shared) * wide + 4 * m.heads
    if s.attn == "math":
        attention += 2 * m.heads * s.sequence_length * wide
    return norms + inputs + attention + 3 * inner * wide


def tokens_of(s: TrainerSettings) -> int:
    """Count the tokens of a micro-batch; a pair of DPO's is two rows."""
    rows = s.per_device_train_batch_size * (2 if s.trainer == "dpo" else 1)
    return rows * s.sequence_length


def held(s: Settings, m: ModelShape) -> int:
    """Return the bytes of activations between a micro-batch's forward and backward."""
    tokens = tokens_of(s)
    if s.checkpointing == "none":
        return m.layers * tokens * kept_by_a_layer(s, m)
    boundaries = m.layers * tokens * m.hidden * DTYPE_BYTES[s.weights_dtype]
    if s.checkpointing == "offloaded":
        return 2 * boundaries // m.layers
    kept = tokens * m.layers * (m.heads * m.head_dim * _compute(s) + 4 * m.heads)
    return boundaries + (kept if s.checkpointing == "selective" else 0)


def moments(s: Settings, m: ModelShape, loss: int) -> dict[Phase, dict[str, dict[Category, int]]]:
    """Return bytes by category (of :data:`TRANSIENT`), by phase (forward, backward) and moment.

    Args:
        s: settings of a run that is not sharded.
        m: the shape of its model.
        loss: bytes of ``loss_logits`` where they are highest.
    """
    wide = _compute(s)
    tokens = tokens_of(s)
    kept, again = held(s, m), 0 if s.checkpointing == "none" else tokens * kept_by_a_layer(s, m)
    gradients, ends = _gradients(s, m)
    before = gradients if s.gradient_accumulation_steps > 1 else 0
    # All but the first layer's, of which the MLP's last product has its gradient.
    nearly = gradients - _unmade(s, m) + (before and ends)
    casts = _casts(s, m)
    one = casts if s.checkpointing == "none" or s.load_in_4bit else casts // m.layers
    out = tokens * _last_product(s, m)
    # A norm's gradients, in float32 and as they are handed on.
    norm = tokens * m.hidden * (4 + wide)
    # SwiGLU's: three of its width, beside the residual stream's (cast where products are narrower).
    stream = DTYPE_BYTES[s.weights_dtype]
    working = 3 * m.intermediate * wide + m.hidden * (stream if stream == wide else stream + wide)
    mlp = {Category.ACTIVATION_GRADIENTS: tokens * working, Category.WEIGHT_CASTS: one}
    gone = tokens * m.intermediate * wide
    start = {Category.ACTIVATIONS: kept, Category.GRADIENTS: before, Category.WEIGHT_CASTS: casts}
    passes = {"loss": {**start, Category.LOSS_LOGITS: loss}}
    first = again or tokens * kept_by_a_layer(s, m)
    back = {
        "loss": {**start, Category.LOSS_LOGITS: loss, Category.GRADIENTS: before + ends, Category.WEIGHT_CASTS: one},
        "last layer": {**mlp, Category.ACTIVATIONS: kept + again - gone, Category.GRADIENTS: before + ends},
        "first layer": {**mlp, Category.ACTIVATIONS: first - gone, Category.GRADIENTS: nearly},
        "embedding": {Category.GRADIENTS: gradients + ends},
    }
    if again:
        computed = {Category.ACTIVATION_GRADIENTS: norm, Category.WEIGHT_CASTS: one, Category.GRADIENTS: before + ends}
        back["last layer, computed again"] = {**computed, Category.ACTIVATIONS: kept + again + out}
    else:
        passes["last product"] = {**start, Category.ACTIVATIONS: kept + out}
    return {Phase.FORWARD: passes, Phase.BACKWARD: back}


def _compute(s: Settings) -> int:
    return 2 if s.mixed_precision != "no" else DTYPE_BYTES[s.weights_dtype]


def _own_copies(s: Settings) -> bool:
    """Tell whether each linear layer casts its input for itself: from a float32 stream, or an adapter's float32."""
    if s.mixed_precision == "no":
        return False
    return s.weights_dtype == "float32" or (s.lora_r is not None and not s.load_in_4bit)


def _gradients(s: Settings, m: ModelShape) -> tuple[int, int]:
    """Return the bytes of all gradients, and of a vocabulary-wide one in flight (the head's, or the embedding's)."""
    if s.has_adapter and s.lora_r is None:
        return 0, 0  # IA3's vectors and prompt tuning's tokens: small, and no formula follows them
    if s.lora_r is not None:
        return m.adapter_parameters(s.lora_r) * (2 if s.load_in_4bit else 4), 0
    wide = DTYPE_BYTES[s.weights_dtype]
    return m.parameters * wide, m.vocabulary * m.hidden * wide


def _unmade(s: Settings, m: ModelShape) -> int:
    """Return the bytes of one layer's gradients but for its last product's, which backward makes first."""
    if s.has_adapter:
        return 0
    layer = (m.parameters - m.embeddings) // m.layers
    return (layer - m.hidden * m.intermediate) * DTYPE_BYTES[s.weights_dtype]


def _last_product(s: Settings, m: ModelShape) -> int:
    """Return the bytes a token that a layer's last linear layer needs while it runs, beside what is kept.

    PEFT copies its input to the adapter's dtype, which autocast copies back (that copy is kept), and adds two outputs.
    """
    wide = _compute(s)
    if s.lora_r is None:
        return m.hidden * wide
    cast = m.intermediate * (wide + 4) if s.mixed_precision != "no" and not s.load_in_4bit else 0
    return cast + 2 * m.hidden * wide


def _casts(s: Settings, m: ModelShape) -> int:
    """Return the bytes of autocast's copies of the layers' weights; of 4-bit ones the largest, unpacked while used."""
    if s.load_in_4bit:
        return 2 * m.hidden * m.intermediate
    if s.mixed_precision == "no" or s.weights_dtype != "float32":
        return 0
    return 2 * (m.parameters - m.embeddings)
