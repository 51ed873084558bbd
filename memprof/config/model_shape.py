"""Read how large a language model is from its config: the one place that knows a config's names for it.

Parameter counts are closed forms, exact for the families in :data:`FAMILIES` and for what their configs can ask for (a
test builds each of them and compares). Decoders of other families are counted as if they were Llama's, and no count of
theirs is claimed: a simulation builds the model itself. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from memprof.config.layer_caches import STATE_ONLY, LayerCache, caches_of, kinds_of, latent_of
from memprof.errors import InputError
from memprof.foreign import ConfigValues

#: What a recording calls a size of the model, and what the model's config calls it.
SIZE_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: What older families' files call a size; transformers' objects know both names.
_OLDER = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions",),
}
# What stands under names that are not those of numbers.
_KINDS: dict[str, tuple[type, ...]] = {
    "model_type": (str,),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), (list, tuple)),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "per_layer_config"), (Mapping,)),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "multi_query", "alibi",
         "new_decoder_architecture", "attention_k_eq_v", "use_qk_norm"),
        (bool, int),
    ),
}  # fmt: skip
# No model has more; a config that says so would take the memory of this machine to list them.
_MOST_LAYERS = 100_000
_MOST = 1 << 40
# Scalings of positions whose config says how far positions reach with them, and from where.
_FROM_ORIGINAL = ("yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Family:
    """What the code of a model type adds to Llama's layers without its config saying so.

    Args:
        attention_bias: the config's field of this name is read; the code of some families has no such biases, whatever
            their config says.
        mlp_bias: the same for this field.
        qkv_bias: q, k and v have biases, the attention's output has none.
        head_norms: q and k are normalised: ``"head"`` with weights of one head's width, ``"all"`` of all heads'.
        norms: norms of the residual stream's width in one layer.
        one_qkv: q, k and v are one linear layer, and so are gate and up.
        full_every: where a config has a window and names no layer types, one layer in so many sees everything; 0: none.
        optional_head_norms: the same as ``head_norms``, where the config has ``use_qk_norm``.
        some_sparse: only some layers are mixtures of experts, by ``decoder_sparse_step`` and ``mlp_only_layers``.
        defaults: what transformers takes for a field that a ``config.json`` leaves out; without one here the value
            follows from the others. A field that is ``null`` is not left out.
    """

    attention_bias: bool = True
    mlp_bias: bool = False
    qkv_bias: bool = False
    head_norms: str = ""
    norms: int = 2
    one_qkv: bool = False
    full_every: int = 0
    optional_head_norms: str = ""
    some_sparse: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Family(mlp_bias=True)  # and what is counted like it, where the type is not known


def _defaults(intermediate_size: int, tie_word_embeddings: bool = False, **others: int) -> dict[str, int]:
    return {"intermediate_size": intermediate_size, "tie_word_embeddings": tie_word_embeddings, **others}


_MISTRAL = _defaults(14336, num_key_value_heads=8)
_COHERE = _defaults(22528, True)
_WINDOW = {"sliding_window": 4096}
_NO_WINDOW = {"use_sliding_window": False}

#: Families whose parameter count is exact, by ``model_type``.
FAMILIES: dict[str, Family] = {
    "llama": Family(mlp_bias=True, defaults=_defaults(11008)),
    "mistral": Family(attention_bias=False, defaults={**_MISTRAL, **_WINDOW}),
    "ministral3": Family(attention_bias=False, defaults={**_MISTRAL, "head_dim": 128}),
    "mixtral": Family(attention_bias=False, defaults={**_MISTRAL, "num_local_experts": 8}),
    "granite": Family(mlp_bias=True, defaults=_defaults(11008)),
    "qwen2": Family(
        attention_bias=False, qkv_bias=True, defaults={**_defaults(22016, num_key_value_heads=32), **_NO_WINDOW}
    ),
    "qwen3": Family(
        head_norms="head", defaults={**_defaults(22016, num_key_value_heads=32, head_dim=128), **_NO_WINDOW}
    ),
    "qwen3_moe": Family(
        head_norms="head",
        some_sparse=True,
        defaults={
            **_defaults(6144, num_key_value_heads=4, num_local_experts=128, moe_intermediate_size=768),
            **_NO_WINDOW,
        },
    ),
    "olmo2": Family(head_norms="all", defaults=_defaults(11008)),
    "olmo3": Family(head_norms="all", full_every=4, defaults={**_defaults(11008), **_WINDOW}),
    "exaone4": Family(
        attention_bias=False,
        head_norms="head",
        full_every=4,
        defaults={**_defaults(16384, num_key_value_heads=32), **_WINDOW},
    ),
    "hunyuan_v1_dense": Family(head_norms="head", defaults=_defaults(11008)),
    "phi3": Family(attention_bias=False, one_qkv=True, defaults=_defaults(8192)),
    "smollm3": Family(mlp_bias=True, defaults={**_defaults(11008, True, num_key_value_heads=4), **_NO_WINDOW}),
    "cohere": Family(norms=1, optional_head_norms="all", defaults=_COHERE),
    "cohere2": Family(norms=1, full_every=4, defaults={**_COHERE, **_WINDOW}),
    "gemma": Family(defaults=_defaults(24576, True, num_key_value_heads=16, head_dim=256)),
    "gemma2": Family(
        norms=4, full_every=2, defaults={**_defaults(9216, True, num_key_value_heads=4, head_dim=256), **_WINDOW}
    ),
    "gemma3_text": Family(
        norms=4,
        head_norms="head",
        full_every=6,
        defaults={**_defaults(9216, True, num_key_value_heads=4, head_dim=256), **_WINDOW},
    ),
}


@dataclass(frozen=True)
class ModelShape:
    """The extents of a decoder, in elements.

    Args:
        model_type: transformers' name of the architecture.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: inner width of the feed-forward network, the widest where layers differ.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of one head's queries and keys.
        value_dim: width of one head's values.
        vocabulary: entries of the embedding.
        tied: the output head shares the embedding.
        experts: feed-forward networks of a layer, where it is a mixture; else 0.
        dense_layers: in a model with such mixtures, how many layers have one network of width ``intermediate`` instead.
        expert_intermediate: inner width of one expert.
        layer_kinds: transformers' name of each layer's kind: ``full_attention``, ``sliding_attention``,
            ``linear_attention`` ...
        window: tokens that a ``sliding_attention`` layer sees; None for all of them.
        attention_bias, mlp_bias: the linear layers have biases.
        head_norms: as in :class:`Family`, with what this config asks for.
        latent: width of what multi-head latent attention caches of a token in place of keys and values; else 0.
        counted: how many parameters there really are, where that is known; ``parameters`` is this number then.
        caches: what each layer keeps of a sequence while it generates.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocabulary: int
    tied: bool
    experts: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    layer_kinds: tuple[str, ...] = field(default=(), repr=False)
    window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    head_norms: str = ""
    latent: int = 0
    counted: int | None = None
    caches: tuple[LayerCache, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, config: Any, counted: int | None = None) -> ModelShape:
        """Read the language model's part of a config: of the values of a ``config.json``, or of transformers' object.

        ``counted``: the number of parameters, where it is known otherwise.

        Raises:
            InputError: a size is missing or no number; the sentence names it.
        """
        read = _reader(config)
        kind = str(read("model_type") or "")
        family = FAMILIES.get(kind, _LLAMA)
        hidden, layers = _count(read, "hidden_size"), _count(read, "num_hidden_layers")
        heads = 0 if kind in STATE_ONLY else _count(read, "num_attention_heads")
        intermediate = _widest(read("intermediate_size")) or 4 * hidden
        latent = latent_of(read)
        head_dim = int((heads and (read("head_dim") or hidden // heads)) or 0)
        if latent:  # queries and keys are wider than what is said of a head
            head_dim = int(read("qk_rope_head_dim")) + int(read("qk_nope_head_dim") or 0)
        value_dim = int((heads and read("v_head_dim")) or head_dim)
        kv_heads = _kv_heads(read, heads)
        kinds = kinds_of(read, family.full_every, layers)
        experts = next((int(n) for n in map(read, _EXPERTS) if n is not None), 0)
        return cls(
            model_type=kind,
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            vocabulary=_count(read, "vocab_size"),
            tied=bool(read("tie_word_embeddings")),
            experts=experts,
            dense_layers=_dense_layers(read, layers) if experts and family.some_sparse else 0,
            expert_intermediate=int(read("moe_intermediate_size") or intermediate),
            layer_kinds=kinds,
            window=read("sliding_window"),
            attention_bias=family.attention_bias and bool(read("attention_bias")),
            mlp_bias=family.mlp_bias and bool(read("mlp_bias")),
            head_norms=(family.optional_head_norms if read("use_qk_norm") else "") or family.head_norms,
            latent=latent,
            counted=counted,
            caches=caches_of(read, kinds, kv_heads, head_dim, value_dim),
        )

    @property
    def family(self) -> Family:
        """Return what is special about this type of model; Llama's where the type is not known."""
        return FAMILIES.get(self.model_type, _LLAMA)

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each ``nn.Linear`` of one layer, by name. Experts are no such modules: of a model with
        mixtures this is the attention."""
        return self._attention if self.experts else {**self._attention, **self._network}

    @property
    def _attention(self) -> dict[str, tuple[int, int]]:
        hidden = self.hidden
        q, k, v = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        found = {"q_proj": (hidden, q), "k_proj": (hidden, k), "v_proj": (hidden, v)}
        if self.family.one_qkv:
            found = {"qkv_proj": (hidden, q + k + v)}
        return {**found, "o_proj": (self.heads * self.value_dim, hidden)}

    @property
    def _network(self) -> dict[str, tuple[int, int]]:
        hidden, inner = self.hidden, self.intermediate
        network = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
        if self.family.one_qkv:
            network = {"gate_up_proj": (hidden, 2 * inner)}
        return {**network, "down_proj": (inner, hidden)}

    @property
    def _sparse_layers(self) -> int:
        """How many layers are mixtures of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embeddings(self) -> int:
        """Count the elements of the embedding, and of the output head where it has its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def matrices(self) -> int:
        """Elements of the weights of all layers' attentions and feed-forward networks (experts too)."""
        attention, network = (_elements(part) for part in (self._attention, self._network))
        experts = self.experts * 3 * self.hidden * self.expert_intermediate
        dense = self.layers - self._sparse_layers
        return self.layers * attention + dense * network + self._sparse_layers * experts

    @property
    def norms_and_biases(self) -> int:
        """Count the elements of all else: norms, biases and the routers of experts."""
        family, q, k = self.family, self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = family.norms * self.hidden + {"head": 2 * self.head_dim, "all": q + k}.get(self.head_norms, 0)
        biases = 0
        if family.qkv_bias or self.attention_bias:
            biases = q + k + self.kv_heads * self.value_dim + (0 if family.qkv_bias else self.hidden)
        if self.mlp_bias:
            biases += 2 * self.intermediate + self.hidden
        return self.layers * (norms + biases) + self._sparse_layers * self.experts * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters: the number that was counted, else the closed form."""
        return self.counted or self.embeddings + self.matrices + self.norms_and_biases

    def adapter_parameters(self, rank: int, targets: Iterable[str] = ("all-linear",)) -> int:
        """Count the elements of a LoRA of this ``rank`` on the linear layers named in ``targets``.

        ``all-linear`` stands for all but the output head. PEFT then adapts experts and their routers too: gate and up,
        which are one tensor, with twice the rank.
        """
        wanted = set(targets)
        every = "all-linear" in wanted

        def ends(part: Mapping[str, tuple[int, int]]) -> int:
            return sum(sum(both) for name, both in part.items() if every or name in wanted)

        total = self.layers * ends(self._attention) + (self.layers - self._sparse_layers) * ends(self._network)
        if every:
            inner = self.expert_intermediate
            experts = self.experts * (2 * (self.hidden + 2 * inner) + self.hidden + inner) + self.hidden + self.experts
            total += self._sparse_layers * experts
        return rank * total

    @property
    def caching_layers(self) -> int:
        """Layers that keep keys and values; at least 1."""
        return max(1, sum(layer.token > 0 for layer in self.caches))

    def kv_cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of one sequence's keys and values, ``itemsize`` bytes an element: a window holds at most its
        size, linear attention nothing, latent attention what both are made from."""
        return sum(layer.key_value_bytes(tokens, itemsize) for layer in self.caches)

    def largest_kv_cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of one sequence's keys and values in the layer that keeps the most."""
        return max((layer.key_value_bytes(tokens, itemsize) for layer in self.caches), default=0)

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of one sequence's states in layers of linear attention, which do not grow with it."""
        return sum(layer.state_bytes(itemsize) for layer in self.caches)


def _reader(config: Any) -> Callable[[str], Any]:
    """Return a function from a name to its value in the language model's config, None where it is not there."""
    if isinstance(config, Mapping):
        inner = config.get("text_config")
        return _values_of(inner if isinstance(inner, Mapping) else config)
    text_of = getattr(config, "get_text_config", None)
    text = config if text_of is None else text_of()
    if getattr(text, "is_heterogeneous", False):  # its object refuses what is not the same in all layers
        return _values_of(text.to_dict())
    return lambda name: getattr(text, name, None)


def _values_of(values: ConfigValues) -> Callable[[str], Any]:
    kind = values.get("model_type")
    left_out = FAMILIES.get(kind, _LLAMA).defaults if isinstance(kind, str) else {}

    def read(name: str) -> Any:
        known = [values[each] for each in (name, *_OLDER.get(name, ())) if each in values]
        found = next((value for value in known if value is not None), None if known else left_out.get(name))
        return None if found is None else _sound(name, found)

    return read


def _sound(name: str, value: Any) -> Any:
    """Return a value of a ``config.json``, so that what reads it need not ask what it is; InputError where it is of
    another kind than its name stands for."""
    if name in _KINDS:
        good = isinstance(value, _KINDS[name])
    else:
        numbers = value if name == "intermediate_size" and isinstance(value, (list, tuple)) and value else (value,)
        good = all(_is_number(n) for n in numbers)
    if not good:
        raise InputError(f"the model's config has {value!r:.40} as its {name}, which that cannot be")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and -_MOST <= value <= _MOST


def _kv_heads(read: Callable[[str], Any], heads: int) -> int:
    """Return the heads of keys and values: all share one where Falcon says so."""
    if read("multi_query") and not read("new_decoder_architecture"):
        return 1
    return int((heads and (read("num_key_value_heads") or read("num_kv_heads"))) or heads)


def _count(read: Callable[[str], Any], name: str) -> int:
    value = read(name)
    if isinstance(value, (int, float)) and 0 < value <= (_MOST_LAYERS if name == "num_hidden_layers" else _MOST):
        return int(value)
    raise InputError(f"the model's config lacks its {name}")


def _dense_layers(read: Callable[[str], Any], layers: int) -> int:
    """Count the layers that are no mixtures of experts, as transformers chooses them."""
    every, dense = int(read("decoder_sparse_step") or 1), list(read("mlp_only_layers") or ())
    return sum(index in dense or (index + 1) % every != 0 for index in range(layers))


def _elements(part: Mapping[str, tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in part.values())


def _widest(value: Any) -> int:
    return int(max(value) if isinstance(value, (list, tuple)) else value or 0)


def positions_of(config: Any) -> int | None:
    """Return how many tokens a model's positions reach, scaled as transformers scales them; None: no limit is known."""
    read = _reader(config)
    limit = read("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1 or read("alibi"):
        return None
    found = read("rope_parameters") or read("rope_scaling") or {}
    # One set of the model's, or one of each kind of layer.
    single = "rope_type" in found or "type" in found
    ropes = [found] if single else [part for part in found.values() if isinstance(part, dict)]
    return max([limit, *(_scaled(limit, rope) for rope in ropes)])


def _scaled(limit: int, rope: dict[str, Any]) -> int:
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = rope.get("original_max_position_embeddings") or limit
    if not (_is_number(factor) and _is_number(original)):
        return limit
    if kind in ("linear", "dynamic"):
        return int(limit * factor)
    # These say from where they stretch; max_position_embeddings may hold that length or the stretched one.
    return int(original * factor) if kind in _FROM_ORIGINAL else limit
