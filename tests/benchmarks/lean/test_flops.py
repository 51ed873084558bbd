"""FLOPs counted in simulations against closed forms, and what the memory of the lean trainer's pages rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks.lean.flops import total, training_flops
from benchmarks.lean.memory import simulated, tokens

_HIDDEN, _WIDE, _LAYERS, _VOCABULARY, _HEADS, _WIDTH, _KV = 64, 160, 3, 512, 4, 16, 2
_PROMPT, _ANSWER, _GROUP = 32, 96, 8
_LINEAR = _HIDDEN * _HEADS * _WIDTH * 2 + _HIDDEN * _KV * _WIDTH * 2 + 3 * _HIDDEN * _WIDE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def case(model: str, **more: Any) -> dict[str, Any]:
    lengths = {"prompt_length": _PROMPT, "completion_length": _ANSWER}
    return {"model": model, "dtype": "bfloat16", **lengths, "gradient_checkpointing": "none", **more}


def attention(queries: int, keys: int, causal: bool) -> float:
    """Forward: two products; a causal kernel computes the triangle."""
    whole = 2 * 2 * _HEADS * _WIDTH * queries * keys
    return whole * (keys + 1) / (2 * keys) if causal else whole


def closed(passes: float, attentions: float, heads: int) -> float:
    """Of a step with every prompt computed for itself."""
    length = _PROMPT + _ANSWER
    layers = 2 * _LINEAR * length * passes + attention(length, length, True) * attentions
    return _GROUP * (_LAYERS * layers + 2 * _HIDDEN * _VOCABULARY * _ANSWER * heads)


def test_pieces_that_are_not_executed_are_counted(model: str) -> None:
    once = {"checkpointing": "none", "tiled_mlp": 0, "loss_chunk_tokens": 16}
    # Eight pieces, of which two are executed.
    found = training_flops(case(model, recipe="lean"), {**once, "max_tokens_per_piece": _PROMPT + _ANSWER})
    # Backward: two products a layer, five for attention's two; the head's gradient comes from its one forward.
    assert total(found) == closed(3, 3.5, 3)


def test_a_checkpointed_layer_is_computed_again(model: str) -> None:
    found = total(training_flops(case(model, recipe="trl", gradient_checkpointing="full")))
    # The head is projected twice. Recomputation stops at the last tensor it is asked for, the down-projection's input.
    saved = 2 * _HIDDEN * _WIDE * _GROUP * _LAYERS * (_PROMPT + _ANSWER)
    assert found == closed(4, 4.5, 4) - saved


def test_a_shared_prompt_is_computed_once(model: str) -> None:
    settings = case(model, recipe="lean", prefix_sharing=True)
    found = training_flops(settings, {"checkpointing": "none", "tiled_mlp": 0, "max_tokens_per_piece": _ANSWER})
    count, rest = tokens(settings), _ANSWER - 1  # the last token of an answer predicts nothing
    assert count == _PROMPT + _GROUP * rest
    over = attention(_PROMPT, _PROMPT, True) + _GROUP * (
        attention(rest, rest, True) + attention(rest, _PROMPT, False)
    )  # fmt: skip
    head = 2 * _HIDDEN * _VOCABULARY * _ANSWER * _GROUP * 3
    assert total(found) == pytest.approx(_LAYERS * (3 * 2 * _LINEAR * count + 3.5 * over) + head, rel=1e-9)


@pytest.mark.heavy  # tests/plan/test_short_steps.py has its subject
def test_micro_batches_passed_over_change_no_peak_and_no_time(model: str) -> None:
    from memprof import analyze
    from memprof.config.gpus import find_gpu
    from memprof.config.settings import Settings
    from memprof.simulate.run import simulate_settings
    from memprof.snapshot.reader import snapshot_from_raw

    tuned = case(model, lora_r=4, per_device_train_batch_size=1, gradient_accumulation_steps=4, num_generations=4)
    raw = simulate_settings(Settings(**tuned), gpu=find_gpu("H100"), stacks=False)
    time = raw["memprof"]["estimated_time"]
    whole = analyze(snapshot_from_raw(raw)).to_dict()
    peaks: dict[str, int] = {}
    for phase in whole["phases"]:
        peaks[phase["phase"]] = max(peaks.get(phase["phase"], 0), phase["peak_bytes"])
    for warmed_up in (False, True):
        few = simulated({**tuned, "on": "H100"}, warmed_up=warmed_up)
        assert few["reserved_bytes"] == whole["device_peak"]["reserved_bytes"]
        # Without the first step its completions are not there when the second's are generated: ids and masks.
        assert few["phases"] == pytest.approx(peaks, abs=16_384, rel=0)
        price = few["price"]
        assert (price["passes"], price["decode_steps"]) == (1, _ANSWER)
        found = price["estimated_seconds"]["H100"]
        assert found["step"] == pytest.approx(time["step_s"], rel=0.02)
        for phase in ("generate", "forward", "backward"):
            assert found[phase] == pytest.approx(time["phases"][phase], rel=0.02)


def test_an_offloaded_cache_is_moved_for_every_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cache, a device holds a layer before and after it grows and the next one; all of it crosses both ways."""
    from memprof.config.gpus import find_gpu
    from memprof.config.speeds import speed_of
    from memprof.simulate.shortcuts.decoding import learning

    def not_learned(*_: Any) -> Any:
        raise learning.PatternMismatch("as the other")

    # What crosses cannot be repeated from a log; both are then reckoned from the first and the last tokens.
    monkeypatch.setattr(learning, "learned", not_learned)
    long = {**case(model), "completion_length": 4096, "on": "H100"}
    here, away = (simulated({**long, "offloaded_cache": yes}, warmed_up=True) for yes in (False, True))
    length = _PROMPT + long["completion_length"]
    layer = 2 * _KV * _WIDTH * 2 * _GROUP * length
    assert here["own_peaks"]["kv_cache"] > _LAYERS * layer
    # All three layers are there or on their way, as are the keys or the values of one that grows.
    assert here["own_peaks"]["kv_cache"] - away["own_peaks"]["kv_cache"] == pytest.approx(layer, rel=0.05)
    assert away["pinned_bytes"] >= _LAYERS * layer
    seconds = [row["price"]["estimated_seconds"]["H100"]["generate"] for row in (here, away)]
    tokens_moved = long["completion_length"] * (_PROMPT + length) / 2
    moved = 2 * _LAYERS * layer / length * tokens_moved / (speed_of(find_gpu("H100").name).host * 0.8)
    assert seconds[1] - seconds[0] == pytest.approx(moved, rel=0.05)


def test_the_price_of_a_rolling_batch_is_its_decode_steps(model: str) -> None:
    """Eight answers, two at a time: at least as many steps as four of them have tokens, fewer than one by one."""
    price = simulated(case(model, recipe="lean", generation_batch=2, num_generations=_GROUP))["price"]
    assert price["passes"] is None
    assert _ANSWER * _GROUP / 2 - _GROUP <= price["decode_steps"] < _ANSWER * _GROUP


def test_the_lean_trainer_goes_in_pieces_while_micro_batches_are_left_out() -> None:
    """Else the tables' lean rows would be of TRL's own step."""
    from benchmarks.lean.memory import repeated_micro_batches_once
    from memprof.grpo import LeanGRPOTrainer
    from memprof.grpo.support import steps_elsewhere

    with repeated_micro_batches_once():
        assert not steps_elsewhere(LeanGRPOTrainer)
