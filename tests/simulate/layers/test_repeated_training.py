"""A simulation that repeats the layers of a training step, backward too, has the events of one that executes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.simulate.layers.test_repeated_layers import _EXPERTS, _GEMMA, _events, _held, _simulated

pytestmark = [pytest.mark.trl]

_LAYERS = 6
_KINDS = ["sliding_attention", "full_attention"] * 5
_TWO_KINDS = {**_GEMMA, "num_hidden_layers": 10, "layer_types": _KINDS}
_LORA = {"lora_r": 8}
_TWICE = {"gradient_accumulation_steps": 2}
#: What is asked of the model, of the run, and whether the backward of layers is repeated.
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "adapter, its weights cast and kept": ({}, _LORA, True),
    "all weights cast and kept": ({}, {"dtype": "float32", **_TWICE}, True),
    "nothing recomputed": ({"model_type": "qwen3"}, {"gradient_checkpointing": False, **_TWICE}, True),
    "attention's outputs saved": ({}, {"gradient_checkpointing": "selective", **_LORA}, True),
    "a reference": ({}, {"beta": 0.1, "num_iterations": 2, **_TWICE, **_LORA}, True),
    "4 bits": ({}, {"load_in_4bit": True, **_TWICE, **_LORA}, True),
    "fp16": ({}, {"dtype": "float32", "mixed_precision": "fp16"}, True),
    "two kinds of layers": (_TWO_KINDS, _LORA, True),
    "lean": ({}, {"recipe": "lean", **_TWICE, **_LORA}, True),
    "experts, whose router is listened to": (_EXPERTS, {}, False),
    "inputs sent to the host": ({}, {"gradient_checkpointing": "offloaded", **_LORA}, False),
    "sharded": ({}, {"gpus": 2, "sharding": "fsdp2"}, False),
    "ZeRO": ({}, {"gpus": 2, "sharding": "zero2"}, False),
}
_OFTEN = ("adapter, its weights cast and kept", "nothing recomputed")


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose backward was repeated, in order."""
    from memprof.simulate.layers.trained import RepeatedCall

    names: list[str] = []
    original = RepeatedCall.backward

    def counted(self: Any, grad: Any) -> Any:
        names.append(self.call.place.names[0])
        return original(self, grad)

    monkeypatch.setattr(RepeatedCall, "backward", counted)
    return names


def _case(name: str) -> Any:
    return pytest.param(name, id=name, marks=[] if name in _OFTEN else [pytest.mark.slow])


@pytest.mark.parametrize("name", [_case(name) for name in _CASES])
def test_repeating_training_leaves_every_event_as_it_is(name: str, tmp_path: Path, backwards: list[str]) -> None:
    from memprof.simulate.layers.repeating import all_layers_executed

    model, asked, some = _CASES[name]
    model = {"num_hidden_layers": _LAYERS, **model}
    with all_layers_executed():
        expected = _simulated(tmp_path, model, asked)
    assert not backwards
    got = _simulated(tmp_path, model, asked)
    assert bool(backwards) == some
    for one, other in zip(_events(expected), _events(got), strict=True):
        assert one == other
    facts, others = expected["memprof"], got["memprof"]
    assert {key for key in facts if facts[key] != others[key]} <= {"created"}
    assert _held(expected) == _held(got)


def _trained(spoil: bool) -> Any:
    """Train a small model three times; ``spoil``: one layer, that has been repeated, has lost its gradients before."""
    import torch
    import transformers

    from memprof.simulate.layers.repeating import layers_repeated
    from memprof.simulate.run import simulate

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=_LAYERS, num_attention_heads=2, vocab_size=100
    )

    def run(session: Any) -> None:
        model = transformers.LlamaForCausalLM(config).train()
        session.add_model(model, "policy")
        with layers_repeated([model], session.fake_recorder):
            for number in range(3):
                if spoil and number == 2:
                    model.model.layers[2].zero_grad(set_to_none=True)
                model(torch.ones(2, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()

    return simulate(run)


def test_a_backward_that_nothing_is_known_of_is_executed(backwards: list[str]) -> None:
    from memprof.simulate.layers.repeating import all_layers_executed, executed_where_different
    from memprof.simulate.layers.trained import LayersDiffer

    with all_layers_executed():
        plain, spoilt = _trained(spoil=False), _trained(spoil=True)
    assert list(_events(_trained(spoil=False))) == list(_events(plain))
    assert backwards == [f"model.layers.{number}" for number in (3, 2, 3, 2)]
    with pytest.raises(LayersDiffer):
        _trained(spoil=True)
    del backwards[:]
    assert list(_events(executed_where_different(lambda: _trained(spoil=True)))) == list(_events(spoilt))
    assert len(backwards) == 4  # of the first try, up to the layer that differs


@pytest.mark.slow
def test_a_device_that_is_full_inside_a_repeated_backward_ends_as_if_executed(
    tmp_path: Path, backwards: list[str]
) -> None:
    from memprof.simulate.layers.repeating import all_layers_executed

    model = {"num_hidden_layers": 7, "vocab_size": 600, "hidden_size": 256, "intermediate_size": 1024}
    asked = {"per_device_train_batch_size": 8}
    room = _simulated(tmp_path, model, asked)["memprof"]["highest"]["reserved_bytes"] - 8 * 2**20
    with all_layers_executed():
        expected = _simulated(tmp_path, model, asked, capacity=room)
    assert expected["memprof"]["oom"]["phase"] == "backward"
    del backwards[:]
    got = _simulated(tmp_path, model, asked, capacity=room)
    assert backwards
    assert list(_events(got)) == list(_events(expected))
    assert _held(got) == _held(expected)
