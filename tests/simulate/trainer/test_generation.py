"""Generation that is repeated from a few tokens' logs, beside a real ``generate`` recorded by the tensor trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memprof.allocator.model import CachingAllocator

pytestmark = [pytest.mark.trl, pytest.mark.slow]

_BATCH, _PROMPT, _TOKENS = 24, 37, 90
_SHAPE = {
    "hidden_size": 48, "intermediate_size": 136, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_CACHES = {
    "dynamic": ({"model_type": "llama"}, "dynamic"),
    "sliding window": (
        {"model_type": "gemma3_text", "sliding_window": 91, "layer_types": ["sliding_attention"] * 4
         + ["full_attention"] + ["sliding_attention"], "query_pre_attn_scalar": 64},
        "dynamic",
    ),
    "static": ({"model_type": "llama"}, "static"),
    "static sliding window": (
        {"model_type": "gemma3_text", "sliding_window": 91, "layer_types": ["sliding_attention"] * 4
         + ["full_attention"] + ["sliding_attention"], "query_pre_attn_scalar": 64},
        "static",
    ),
    "fp8": ({"model_type": "llama"}, "quantized", "fp8"),
    "quantised": ({"model_type": "llama"}, "quantized", "int4"),
    "linear attention": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 3 + ["full_attention"] * 3,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "linear_conv_kernel_dim": 4, "mlp_only_layers": list(range(6))},
        "dynamic",
    ),
}  # fmt: skip


def settings_for(folder: Path, name: str) -> Any:
    from memprof.config.settings import Settings

    more, cache, *dtype = _CACHES[name]
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **more}))
    return Settings(
        model=str(folder), device="cpu", dtype="bfloat16", per_device_train_batch_size=_BATCH, num_generations=_BATCH,
        prompt_length=_PROMPT, completion_length=_TOKENS, cache_implementation=cache,
        cache_dtype=dtype[0] if dtype else "auto",
    )  # fmt: skip


def generation_config(settings: Any) -> Any:
    from transformers import GenerationConfig

    from memprof.config.to_trl_config import cache_arguments

    asked = cache_arguments(settings.cache_implementation, settings.cache_dtype)
    asked |= asked.pop("generation_kwargs", {})
    if settings.cache_dtype == "int4":  # several times within the tokens
        asked["cache_config"]["residual_length"] = 16
    return GenerationConfig(
        do_sample=True, max_new_tokens=settings.completion_length, pad_token_id=1, temperature=0.9, top_k=0,
        disable_compile=True, **asked,
    )  # fmt: skip


def recorded(settings: Any) -> list[tuple[str, int, int]]:
    """Generate for real; what its tensors took and gave back: action, address, bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memprof.recording.trace.tensor_trace import TensorTrace
    from memprof.simulate.trainer.kv_caches import modelled_quanto

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings.model), dtype=torch.bfloat16)
    trace = TensorTrace(torch.device("cpu"), stacks=None)
    trace.start()
    try:
        with torch.no_grad(), modelled_quanto():
            ids = torch.zeros(_BATCH, _PROMPT, dtype=torch.long)
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation_config(settings)
            )
            assert out.shape == (_BATCH, _PROMPT + _TOKENS)
            del out, ids
    finally:
        trace.stop()
    raw, _ = trace.dump()
    return [(e["action"], e["addr"], e["size"]) for e in raw["device_traces"][0] if e["action"] != "free_completed"]


def one_by_one(heap: CachingAllocator, events: list[tuple[str, int, int]]) -> None:
    """Ask the allocator for what was recorded; what was there before is left out."""
    places: dict[int, int] = {}
    for action, address, size in events:
        if action == "alloc":
            places[address], _ = heap.malloc(size)
        elif address in places:
            heap.free(places.pop(address))


def take_from(heap: CachingAllocator, recorder: Any) -> None:
    """Let a recorder take from another heap what is asked for from now on."""
    recorder.allocator = heap
    for part in (recorder.blocks, recorder.blocks.trace, recorder.blocks.windows):
        part._heap = heap
    heap.on_event = recorder.blocks.trace._add


def simulated(settings: Any, heap: CachingAllocator, *, whole: bool = True) -> Any:
    """Generate on fake tensors, as the simulator does: the first, the last and some other tokens."""
    import torch

    from memprof.compat import patching
    from memprof.compat import transformers as names
    from memprof.recording.recorder import DeviceInfo
    from memprof.simulate.fake_cuda.dispatch import OperationTracking
    from memprof.simulate.fake_cuda.fakes import fake_world
    from memprof.simulate.recorder.recorder import FakeRecorder
    from memprof.simulate.shortcuts.decoding.learning import Player, learned
    from memprof.simulate.trainer.kv_caches import modelled_quanto
    from memprof.simulate.trainer.models import build_model, load_config
    from memprof.simulate.trainer.rollout import counted, cutting

    recorder = FakeRecorder(CachingAllocator(), DeviceInfo(0, "cpu", "", None), cuda=False, stacks=None)
    with (
        fake_world(cuda=False),
        OperationTracking(recorder, True, lambda shape: 0),
        modelled_quanto(),
        patching((names.SAMPLE, counted(names.SAMPLE.get())), (names.UNFINISHED, cutting(recorder))),
        torch.no_grad(),
    ):
        recorder.start()
        model = build_model(load_config(settings.model), "bfloat16", attention="sdpa")
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device("cpu")), generation_config=generation_config(settings)
        )
        take_from(heap, recorder)  # without the model
        try:
            decoding = learned(trainer, model, _BATCH, settings, recorder)
            Player(recorder, decoding, whole=whole).play()
        finally:
            recorder.stop()
    return decoding


# The others differ from these by what one of these has too.
_HEAVY = ("static sliding window", "fp8", "static", "linear attention")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.heavy] if name in _HEAVY else []) for name in _CACHES]
)
def test_the_allocator_ends_as_after_every_recorded_event(name: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, name)
    events = recorded(settings)
    whole, ours = CachingAllocator(), CachingAllocator()
    one_by_one(whole, events)
    decoding = simulated(settings, ours)
    assert decoding.repeated > _TOKENS / 3, "most tokens are executed by nobody"
    for what in ("max_allocated", "max_requested", "max_reserved", "allocated", "reserved"):
        assert getattr(ours, what) == getattr(whole, what), what


def test_a_quantised_cache_is_highest_where_it_is_quantised_for_the_last_time(tmp_path: Path) -> None:
    """Between the first and the last time nobody executes a step; where nothing is reserved, the last ones suffice."""
    settings = settings_for(tmp_path, "quantised")
    every, ends = CachingAllocator(), CachingAllocator()
    decoding = simulated(settings, every)
    assert (decoding.jumps.times, decoding.periods.jumps.times) == (5, 5)
    simulated(settings, ends, whole=False)
    for what in ("max_allocated", "max_requested", "allocated"):
        assert getattr(ends, what) == getattr(every, what), what
