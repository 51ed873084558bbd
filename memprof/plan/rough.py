"""The rough math: what standing components weigh, by formulas one can do on paper. No torch here.

For decoder models of the Llama family (Llama, Mistral, Qwen 2 and 3, SmolLM2, Phi-3's sizes): grouped attention, gated
feed-forward, tied or own output head. Activations have no such formula; they are executed (``memprof simulate``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memprof.config.settings import Settings

__all__ = ["Shape", "rough", "shape_of"]

_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """What the formulas need of a model; every field is a count."""

    layers: int
    hidden: int
    feed: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    head_norms: bool

    @property
    def projections(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one block."""
        mixed, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, mixed), (self.hidden, shared), (self.hidden, shared), (mixed, self.hidden)]
        return [*attention, (self.hidden, self.feed), (self.hidden, self.feed), (self.feed, self.hidden)]

    @property
    def embedding(self) -> int:
        """Values of the embeddings, and of the output head where it has its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def blocks(self) -> int:
        """Values of all layers' linear weights."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.projections)

    @property
    def small(self) -> int:
        """Norms and biases."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.attention_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return self.layers * (norms + biases) + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embedding + self.blocks + self.small

    def adapter(self, rank: int) -> int:
        """Values of a LoRA on every linear layer of the blocks."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.projections)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """From the values of a model's ``config.json``."""
    heads = config["num_attention_heads"]
    kind = config.get("model_type")
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        feed=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        attention_bias=kind == "qwen2",
        head_norms=kind == "qwen3",
    )


def rough(shape: Shape, settings: Settings) -> dict[str, int]:
    """Bytes of each component that a formula gives, for one GPU; those that are not there are left out.

    Weights in ``dtype``; a gradient as wide as its parameter (an adapter is fp32, on 4-bit layers bf16); Adam's two
    moments likewise, or one byte each and an fp32 scale for each 256 with 8-bit Adam (the embedding and small tensors
    stay fp32); bf16 copies of fp32 linear weights and of the head, all at once without checkpointing; keys and values
    of all but the last token, as wide as the weights; ``logits`` is one bf16 copy of [sequences, completion + 1,
    vocabulary]: TRL's older loss held several, 1.16 never makes it.
    """
    width = _WIDTH[settings.dtype]
    sequences = settings.per_device_train_batch_size * settings.generation_steps
    found = {"kv_cache": _cache(shape, settings, sequences), "logits": _logits(shape, settings)}
    found["weights"] = _weights(shape, settings, width)
    if settings.lora_r is not None:
        trained, held = shape.adapter(settings.lora_r), 2 if settings.load_in_4bit else 4
        found["adapters"] = found["gradients"] = held * trained
        found["optimizer_state"] = _moments(settings.optim, 0, 0, trained, held)
    else:
        found["gradients"] = width * shape.parameters
        found["optimizer_state"] = _moments(
            settings.optim, shape.vocabulary * shape.hidden, shape.small, shape.parameters, width
        )
        if settings.beta:
            found["reference_model"] = found["weights"]
    if settings.dtype == "float32" and settings.mixed_precision == "bf16" and not settings.gradient_checkpointing:
        found["weight_casts"] = 2 * (shape.blocks + shape.vocabulary * shape.hidden)
    return found


def _weights(shape: Shape, settings: Settings, width: int) -> int:
    if not settings.load_in_4bit:
        return width * shape.parameters
    # NF4: half a byte a value and an fp32 scale for each block of 64; embeddings, head and norms as they are.
    return shape.blocks // 2 + 4 * (shape.blocks // 64) + width * (shape.embedding + shape.small)


def _moments(optimizer: str, embedding: int, small: int, every: int, width: int) -> int:
    """Of ``every`` value; ``embedding`` and ``small`` ones (norms, biases) are those that 8-bit Adam keeps in fp32."""
    if optimizer in ("sgd", "none"):
        return 0
    if "8bit" in optimizer:
        whole = small + (0 if optimizer == "adamw_torch_8bit" else embedding)
        return 8 * whole + 2 * (every - whole) + 8 * ((every - whole) // 256)
    return 2 * width * every


def _cache(shape: Shape, settings: Settings, sequences: int) -> int:
    if settings.generation != "hf":
        return 0
    held = settings.sequence_length - 1
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * _WIDTH[settings.dtype] * held * sequences


def _logits(shape: Shape, settings: Settings) -> int:
    if settings.recipe not in ("trl-full-logits", "trl-0.14"):
        return 0
    return 2 * settings.per_device_train_batch_size * (settings.completion_length + 1) * shape.vocabulary
