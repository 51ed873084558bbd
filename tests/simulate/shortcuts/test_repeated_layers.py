"""A simulation that repeats layers has the events of one that executes all of them, one by one."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl]

_SHAPE = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 136, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_KINDS = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"]
_GEMMA = {
    "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 40, "layer_types": _KINDS,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
_EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LORA = {"lora_r": 8}
_SCORED = {"num_iterations": 2, "beta": 0.1}
#: What is asked of the model, of the run, and whether layers are repeated.
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "adapter": ({}, _LORA, True),
    "scored by policy and reference": ({"model_type": "qwen3"}, _SCORED, True),
    "static cache": ({}, {"cache_implementation": "static"}, True),
    "sliding window": (_GEMMA, {}, True),
    "static sliding window": (_GEMMA, {"cache_implementation": "static"}, True),
    "experts": (_EXPERTS, {}, True),
    "sharded": ({}, {"gpus": 2, "sharding": "fsdp2"}, True),
    "weights cast and kept": ({}, {"dtype": "float32"}, False),
}
_OFTEN = ("adapter", "sharded")
# Each half has a case of its own.
_BOTH_APART = ("static sliding window",)


def _case(name: str) -> Any:
    marks = [] if name in _OFTEN else [pytest.mark.heavy if name in _BOTH_APART else pytest.mark.slow]
    return pytest.param(name, id=name, marks=marks)


def _simulated(folder: Path, model: dict[str, Any], asked: dict[str, Any], **more: Any) -> Any:
    from memprof.config.gpus import gpu_of
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings

    (folder / "config.json").write_text(json.dumps({**_SHAPE, **model}))
    settings = Settings(
        model=str(folder), prompt_length=48, completion_length=24, num_generations=4,
        **{"per_device_train_batch_size": 4, "dtype": "bfloat16", **asked},
    )  # fmt: skip
    gc.collect()
    gc.disable()  # or circles of references go at another time
    try:
        return simulate_settings(settings, gpu=gpu_of("H100"), **more)
    finally:
        gc.enable()


def _events(raw: Any) -> Iterator[tuple[Any, ...]]:
    """List the trace's events. Of frees in a row the order is left out: autocast's cache drops its copies of weights in
    the order of their addresses in this process."""
    freed: list[tuple[Any, ...]] = []
    for event in raw["device_traces"][0]:
        here = (event.get("addr"), event["size"], event["stream"], event["segment_pool_id"])
        if event["action"].startswith("free_"):
            freed.append((here, event["action"]))
            continue
        yield from sorted(freed)
        freed = []
        frames = tuple((f["filename"], f["line"], f["name"]) for f in event["frames"] if not _is_test(f["filename"]))
        yield (here, event["action"], event["time_us"], event["user_metadata"], frames)
    yield from sorted(freed)


def _is_test(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were repeated, in order."""
    from memprof.simulate.shortcuts.layers.pattern import Pattern

    names: list[str] = []
    original = Pattern.repeat

    def counted(self: Any, place: Any, given: Any) -> Any:
        names.append(place.names[0])
        return original(self, place, given)

    monkeypatch.setattr(Pattern, "repeat", counted)
    return names


@pytest.mark.parametrize("name", [_case(name) for name in _CASES])
def test_repeating_layers_leaves_every_event_as_it_is(name: str, tmp_path: Path, repeated: list[str]) -> None:
    from memprof.simulate.plain import without

    model, asked, some = _CASES[name]
    with without("layers"):
        expected = _simulated(tmp_path, model, asked)
    assert not repeated
    got = _simulated(tmp_path, model, asked)
    assert bool(repeated) == some
    assert not any(layer.endswith((".0", ".1")) for layer in repeated)
    for one, other in zip(_events(expected), _events(got), strict=True):
        assert one == other
    facts, others = expected["memprof"], got["memprof"]
    assert {key for key in facts if facts[key] != others[key]} <= {"created"}
    assert _held(expected) == _held(got)


def _held(raw: Any) -> list[tuple[int, str, int]]:
    return [(block["address"], block["state"], block["size"]) for s in raw["segments"] for block in s["blocks"]]


def test_layers_differ_by_what_their_modules_hold() -> None:
    import torch
    from torch import nn

    from memprof.simulate.shortcuts.layers.structure import structure_of
    from memprof.simulate.shortcuts.layers.values import NotAlike

    def layer(**attributes: Any) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        for name, value in attributes.items():
            setattr(made[0], name, value)
        return made

    plain = structure_of(layer(), "a")
    assert structure_of(layer(layer_idx=3), "a") == structure_of(layer(layer_idx=4), "a")
    assert structure_of(layer(own="x.a.0"), "x.a") == structure_of(layer(own="x.b.0"), "x.b")
    different = [layer(window=3), layer(scaling={"default": 2.0}), layer(forward=lambda x: x), layer(odd=object())]
    different.append(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.LayerNorm(4)))
    different.append(layer().eval())
    assert plain not in [structure_of(other, "a") for other in different]
    hooked = layer()
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(NotAlike, match="hooks"):
        structure_of(hooked, "a")
