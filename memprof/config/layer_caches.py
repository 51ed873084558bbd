"""Say what each layer of a model keeps of a sequence while it generates: keys and values, or a state of fixed size.

Rules: the caches and configs of transformers 5.23. Its DeepSeek models keep the latent that keys and values are made
of, its last ``num_kv_shared_layers`` layers read another layer's. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memprof.foreign import ConfigValues

#: Model types whose layers all keep a state and whose config names no layers.
STATE_ONLY = ("mamba", "mamba2", "falcon_mamba")

_LINEAR = ("linear_attention", "conv", "mamba")
_BOTH = ("hybrid", "hybrid_sliding")  # keys and values beside a state
_NEITHER = ("moe", "mlp", "dummy")
_WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")

Read = Callable[[str], Any]


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of one sequence.

    Args:
        token: elements of one token's keys and values; 0 where the layer keeps none, or reads another layer's.
        window: the most tokens that are kept; None for all of them.
        convolution: elements of the last inputs of a short convolution, in the model's dtype.
        recurrent: elements of a state that the tokens before are summed up in, in float32.
    """

    token: int
    window: int | None = None
    convolution: int = 0
    recurrent: int = 0

    def key_value_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of ``tokens`` tokens, ``itemsize`` an element."""
        return self.token * (tokens if self.window is None else min(tokens, self.window)) * itemsize

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of the state, as large after one token as after all."""
        return self.convolution * itemsize + self.recurrent * 4


def caches_of(read: Read, kinds: Iterable[str], kv_heads: int, head_dim: int, value_dim: int) -> tuple[LayerCache, ...]:
    """Return what each layer keeps.

    ``read`` leads from a name to its value in the language model's config; ``kinds`` are transformers' names of the
    layers; ``kv_heads``, ``head_dim`` and ``value_dim`` are of those whose config says nothing else.
    """
    convolution, recurrent = _states(read)
    window = read("sliding_window") or read("attention_chunk_size")
    kinds = tuple(kinds)
    own = len(kinds) - int(read("num_kv_shared_layers") or 0)
    found = []
    for index, kind in enumerate(kinds):
        if kind in _LINEAR:
            found.append(LayerCache(0, None, convolution, 0 if kind == "conv" else recurrent))
            continue
        token = _token(read, index, kind, kv_heads, head_dim, value_dim)
        state = (convolution, recurrent) if kind in _BOTH else (0, 0)
        kept = 0 if kind in _NEITHER or index >= own else token
        found.append(LayerCache(kept, window if kind in _WINDOWED else None, *state))
    return tuple(found)


def latent_of(read: Read) -> int:
    """Count the elements of one token's latent and its rotary key, of multi-head latent attention; 0 where it is not.
    What DeepSeek's later models keep beside it is not counted."""
    rank, rotary = read("kv_lora_rank"), read("qk_rope_head_dim")
    return int(rank) + int(rotary) if rank and rotary else 0


def _token(read: Read, index: int, kind: str, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Count the elements of one token's keys and values in one layer."""
    if latent := latent_of(read):
        return latent
    own = _of_layer(read, index, kind)
    heads = int(own.get("num_key_value_heads") or kv_heads)
    width = own.get("head_dim")
    return heads * (2 * int(width) if width else head_dim + value_dim)


def _of_layer(read: Read, index: int, kind: str) -> ConfigValues:
    """Return what the config says of one layer alone: Gemma 4's layers that see everything have wider heads."""
    layers = read("per_layer_config")
    if isinstance(layers, Mapping):
        found = layers.get(index, layers.get(str(index)))
        return {k: v for k, v in found.items() if isinstance(v, int)} if isinstance(found, Mapping) else {}
    if kind == "full_attention" and read("global_head_dim"):
        heads = read("num_global_key_value_heads") if read("attention_k_eq_v") else None
        return {"head_dim": read("global_head_dim"), "num_key_value_heads": heads}
    return {}


def _states(read: Read) -> tuple[int, int]:
    """Count the elements of a layer's convolution's and of its recurrent state; 0 where a config names neither."""
    if read("linear_num_value_heads"):  # the gated delta rule
        key_heads, value_heads = int(read("linear_num_key_heads")), int(read("linear_num_value_heads"))
        key_dim, value_dim = int(read("linear_key_head_dim")), int(read("linear_value_head_dim"))
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return channels * int(read("linear_conv_kernel_dim")), value_heads * key_dim * value_dim
    if read("conv_L_cache"):
        return int(read("hidden_size")) * int(read("conv_L_cache")), 0
    return _mamba_states(read)


def _mamba_states(read: Read) -> tuple[int, int]:
    """Count the states of Mamba (one value a channel) and Mamba 2 (heads), whose configs have several spellings."""
    state = _first(read, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = _first(read, "mamba_d_conv", "conv_kernel")
    if not state or not kernel:
        return 0, 0
    heads = _first(read, "mamba_n_heads", "mamba_num_heads", "num_heads")
    if not heads:
        if read("model_type") in STATE_ONLY:
            inner = int(read("intermediate_size") or 0)
        else:
            inner = int(read("mamba_expand") or 2) * int(read("hidden_size"))
        return inner * kernel, inner * state
    inner = int(read("mamba_d_ssm") or heads * (_first(read, "mamba_d_head", "mamba_head_dim", "head_dim") or 0))
    groups = _first(read, "mamba_n_groups", "n_groups") or 1
    return (inner + 2 * groups * state) * kernel, inner * state


def _first(read: Read, *names: str) -> int:
    """Return the first of the values that is a number, else 0."""
    return next((int(value) for name in names if isinstance(value := read(name), int) and value), 0)


def kinds_of(read: Read, full_every: int, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer by transformers' name.

    ``full_every``: where the config has a window and names no layers, one in so many sees everything; 0: none.
    """
    stated = read("layer_types")
    if stated:
        return tuple(str(kind) for kind in stated)
    if read("model_type") in STATE_ONLY:
        return ("linear_attention",) * layers
    if every := read("full_attention_interval"):
        return tuple("linear_attention" if (i + 1) % int(every) else "full_attention" for i in range(layers))
    if read("sliding_window") is None or read("use_sliding_window") is False:
        return ("full_attention",) * layers
    every = int(read("sliding_window_pattern") or full_every)
    seen = [every > 0 and (i + 1) % every == 0 for i in range(layers)]
    return tuple("full_attention" if full else "sliding_attention" for full in seen)
