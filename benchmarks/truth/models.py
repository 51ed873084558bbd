"""Shrink named models: tiny distinct extents beside the real ones they stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.truth.scale import Scale

TILE = 32768  # vocabulary columns of one tile of TRL's chunked log-probabilities


@dataclass(frozen=True)
class Shapes:
    """A model family with the big extents, and the tiny ones that run. Layers and heads are the real ones."""

    name: str
    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    tied: bool
    tiny_head_dim: int = 34
    tiny_hidden: int = 61
    tiny_ffn: int = 131
    tiny_vocab: int = 1013
    extra: dict[int, int] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        return -(-self.vocab // TILE)

    @property
    def tiny_tile(self) -> int:
        """Return the columns of a tiny tile: the same number of tiles as the big vocabulary has."""
        return -(-self.tiny_vocab // self.tiles) + 2

    def features(self) -> dict[int, int]:
        """Map tiny extents to big ones."""
        out = {
            self.tiny_hidden: self.hidden,
            self.tiny_ffn: self.ffn,
            self.tiny_vocab: self.vocab,
            self.tiny_head_dim: self.head_dim,
            self.tiny_head_dim // 2: self.head_dim // 2,
            self.heads * self.tiny_head_dim: self.heads * self.head_dim,
            self.kv_heads * self.tiny_head_dim: self.kv_heads * self.head_dim,
            **self.extra,
        }
        if self.tiles > 1:
            last = self.tiny_vocab - (self.tiles - 1) * self.tiny_tile
            out[self.tiny_tile] = TILE
            out[last] = self.vocab - (self.tiles - 1) * TILE
        return out

    def parameters(self) -> int:
        """Count the elements of the big model's unique parameters (closed form, for the tests)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * q + 2 * self.hidden * kv + 3 * self.hidden * self.ffn + 2 * self.hidden
        if self.family == "qwen2":
            layer += q + 2 * kv
        if self.family == "qwen3":
            layer += 2 * self.head_dim
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


def scale_for(models: list[Shapes], tokens: int, prompt: int, completion: int, batches: set[int]) -> Scale:
    """Return the mapping of a run; refuse tiny extents that could mean two things."""
    features: dict[int, int] = {}
    vocabulary: set[int] = set()
    for shapes in models:
        for tiny, big in shapes.features().items():
            if features.setdefault(tiny, big) != big:
                raise ValueError(f"the tiny extent {tiny} would stand for {features[tiny]} and {big}")
        last = shapes.tiny_vocab - (shapes.tiles - 1) * shapes.tiny_tile
        vocabulary |= {shapes.tiny_vocab} | ({shapes.tiny_tile, last} if shapes.tiles > 1 else set())
    lengths = set(range(prompt - 1, prompt + completion + 2))
    clash = features.keys() & ({b * t for b in batches for t in lengths} | set(range(1, completion + 2)))
    clash |= {n for s in models for n in (s.heads, s.kv_heads)} & lengths
    if clash:
        raise ValueError(f"tiny extents {sorted(clash)} collide with token counts")
    return Scale(features, vocabulary, {s.tiny_hidden for s in models}, tokens, lengths, completion, batches,
                 {n for s in models for n in (s.heads, s.kv_heads)})


def save_tokenizer(folder: Path, vocab: int) -> None:
    """Save a word-level tokenizer with ``vocab`` words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, vocab)}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    ).save_pretrained(folder)


def save_model(folder: Path, shapes: Shapes, seed: int, labels: int = 0) -> Path:
    """Save a random tiny checkpoint of ``shapes``' family and its tokenizer (``labels``: a sequence classifier)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        shapes.family, hidden_size=shapes.tiny_hidden, intermediate_size=shapes.tiny_ffn,
        num_hidden_layers=shapes.layers, num_attention_heads=shapes.heads, num_key_value_heads=shapes.kv_heads,
        head_dim=shapes.tiny_head_dim, vocab_size=shapes.tiny_vocab, tie_word_embeddings=shapes.tied,
        max_position_embeddings=4096, eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )
    if labels:
        config.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # Random models end a completion at random; this one never does, so that lengths are known.
            model.get_input_embeddings().weight[0] = 0
            model.get_output_embeddings().weight[0] = 0
    model.save_pretrained(folder)
    save_tokenizer(folder, shapes.tiny_vocab)
    return folder
