"""Valid inputs of each kind that memprof reads, small, with a value in every field: what the mutants are made of."""

from __future__ import annotations

from typing import Any


def snapshot() -> dict[str, Any]:
    """Make a snapshot with a step, an allocation that failed, and every part of memprof's own key."""
    from tests.synthetic import SnapshotBuilder

    made = SnapshotBuilder()
    made.ghost(4096)
    weight = made.alloc(1 << 20, "load", metadata="memprof:phase=load;category=weights")
    for step in (1, 2):
        hidden = made.alloc(3 << 20, "forward", metadata=f"memprof:phase=forward;step={step};region=forward")
        made.alloc(1 << 19, "backward", metadata=f"memprof:phase=backward;step={step};region=backward")
        made.free(hidden)
    failed = {"action": "oom", "addr": 1 << 20, "device_free": 1 << 20, "size": 1 << 30, "stream": 0, "frames": []}
    made.events.append({**failed, "time_us": made.time_us + 10, "user_metadata": ""})
    return made.raw(_own_key(weight, made.time_us))


def foreign_snapshot() -> dict[str, Any]:
    """Make a snapshot as PyTorch writes it, without memprof's key: stacks and annotations alone tell its phases."""
    from tests.synthetic import SnapshotBuilder

    made = SnapshotBuilder()
    made.ghost(4096)
    made.alloc(1 << 20, "load")
    hidden = made.alloc(3 << 20, "forward", "train")
    made.alloc(1 << 19)
    made.free(hidden)
    made.alloc(1 << 18)
    return made.raw()


def annotations(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Make an optimizer's annotations around the second half of a snapshot's events."""
    (trace,) = raw["device_traces"]
    name = "Optimizer.step#AdamW.step"
    times = {"START": trace[len(trace) // 2]["time_us"], "END": trace[-1]["time_us"]}
    return [{"name": name, "stage": stage, "device": 0, "time_us": time} for stage, time in times.items()]


def allocator_settings() -> dict[str, Any]:
    """Make the allocator's settings as PyTorch writes them."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "max_split_size": -1,
        "garbage_collection_threshold": 0.5, "expandable_segments": False, "release_lock_on_cudamalloc": False,
        "roundup_power2_divisions": {"1": 0, "2": 4},
    }  # fmt: skip


def _own_key(weight: int, end: int) -> dict[str, Any]:
    start, half = 1_000_000, (1_000_000 + end) // 2
    spans = [("load", start, half, None), ("forward", half, end - 40, 1), ("backward", end - 40, None, 1)]
    names = ("phase", "start_us", "end_us", "step")
    phases = [{**dict(zip(names, span, strict=True)), "within": None, "detail": None} for span in spans]
    peaks = dict.fromkeys(("allocated_peak", "reserved_peak", "allocated_end", "reserved_end", "active_peak"), 9 << 20)
    counted = {"phase": "forward", "step": 1, "start_us": half, "end_us": end, "requested_peak": 9 << 20, **peaks}
    failed = {"requested_bytes": 1 << 30, "device_free_bytes": 1 << 20, "phase": "forward", "step": 1, "time_us": end}
    return {
        "schema": "memprof.snapshot/1",
        "kind": "cuda",
        "versions": {"memprof": "0.1", "python": "3.11", "torch": "2.13.0", "trl": "1.16"},
        "device": {"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34},
        "devices": [{"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34}],
        "rank": 0,
        "world_size": 2,
        "node": "here",
        "created": "2026-01-01T00:00:00",
        "config": {"learning_rate": 1e-5, "optim": "adamw_torch_fused", "max_completion_length": 16, "bf16": True},
        "setup": {
            "model_config": {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 64,
                             "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16},
            "dtypes": {"float32": 4096}, "load_in_4bit": False, "batches": [[1, 2, 8, 8]], "lengths": [[1, 8, 8]],
            "adapter": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
        },
        "recorded": {"start_us": start, "stop_us": end, "history": "complete", "dropped_events": 0,
                     "max_entries": 100_000, "thinned": [[half, half + 5]]},
        "phases": phases,
        "steps": [[1, start, half, 128], [2, half, end, 256]],
        "owners": [[weight, end, "weights", None, "model.embed"]],
        "holders": [[weight, end, "Model.embed"]],
        "buckets": [1 << 19],
        "counters": [counted],
        "samples": [[start, 1 << 30, 1 << 30, 1 << 20, 1 << 31, 0, 1 << 24], [end, 1, *[None] * 5]],
        "switches": [[half, "sleep", 1, 1 << 20, 1 << 21, 0, 1 << 30]],
        "outside": {"reason": None, "mig": False, "capacity_bytes": 1 << 34, "used_bytes": 1 << 32,
                    "own_bytes": 1 << 31, "others_bytes": 1 << 20, "first_own_bytes": 1 << 28,
                    "first_reserved_bytes": 0,
                    "processes": [[1, 1 << 31], [2, None]], "this_process": 1, "process_groups": 1,
                    "allocators": ["cublas"]},
        "host": {"pinned_bytes": 1 << 20, "pinned_requested_bytes": 1 << 20, "managed_bytes": None,
                 "rss_bytes": 1 << 30, "offloaded": {"optimizer_state": 1 << 20}},
        "oom": {**failed, "stack": ["a.py:1 f"], "device": 0, "limit_bytes": 1 << 33},
        "survived": [{**failed, "device": 0, "went_on_us": half}],
        "non_torch_bytes": 1 << 28,
        "overhead": {"seconds_in_memprof": 0.5, "bytes_of_history": 4096},
        "notes": ["a note"],
        "own_folders": [["/x", "memprof"]],
        "sources": [{"path": "/x/train.py", "text": "x = 1\n", "cut": True, "edited": True}],
    }  # fmt: skip


def counters() -> list[dict[str, Any]]:
    about = {
        "schema": "memprof.counters/1",
        "rank": 0,
        "started": 1.0,
        "world_size": 1,
        "node": None,
        "pid": 1,
        "device": {"index": 0, "type": "cuda", "name": "a card", "total_bytes": 1 << 34},
        "steps": 2,
        "model": "m",
        "config": {"model": "m"},
        "device_name": "a card",
        "device_total_bytes": 1 << 34,
        "max_steps": 2,
    }
    names = (
        "peak_allocated",
        "peak_reserved",
        "allocated",
        "reserved",
        "inactive_split",
        "cached",
        "non_torch",
        "host_rss",
        "host_rss_peak",
        "host_pinned",
        "host_anon",
        "host_files",
        "host_shared",
        "host_children",
        "host_arenas",
    )
    step = {"time": 2.0, "recorded": True, **dict.fromkeys(names, 1 << 20), "phases": {"forward": 1 << 20}}
    most = {"categories": {"weights": 1 << 20}, "groups": {"training": 1 << 20, "total": 1 << 20}, "step": 1}
    ended = {"ended": 3.0, "steps": 2, "peak_allocated": 1 << 20, "peak_reserved": 1 << 20, "error": None}
    return [about, {"step": 1, **step}, most, {"step": 2, **step}, ended]


def settings() -> dict[str, Any]:
    """Make a configuration with a value for most settings, under memprof's names and under other tools'."""
    return {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dtype": "bfloat16", "trainer": "grpo",
        "optim": "adamw_torch",
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8, "beta": 0.04,
        "max_prompt_length": 128, "max_completion_length": 256, "steps_per_generation": 2, "learning_rate": 1e-5,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "use_peft": True,
        "lora_r": 16, "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": False, "bf16": True,
        "bnb_4bit_compute_dtype": "bfloat16", "attn": "flash", "generation": "hf", "recipe": "trl", "gpus": 1,
        "sharding": "ddp", "use_vllm": False, "report_to": "none", "output_dir": "out",
    }  # fmt: skip


def model_config() -> dict[str, Any]:
    """Make the ``config.json`` of a small model."""
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 1024, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                         "original_max_position_embeddings": 256},
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention"], "head_dim": 16, "rms_norm_eps": 1e-6,
    }  # fmt: skip


def rules() -> str:
    """Write a file of stack rules."""
    return """schema = "memprof.rules/1"
[transparent]
frames = ["mine/wrap.py:call|inner"]
[frames]
cache = ["mine/cache.py:*"]
[[rule]]
name = "mine.cache"
comment = "My cache."
tier = "specific"
category = "activations"
detail = "saved"
phases = ["forward", "backward"]
inner = ["mine/cache.py:make|grow"]
none = ["*:torch::autograd::*"]
inside = ["mine/cache.py:make", "mine/model.py:forward"]
example = ["mine/cache.py:make", "mine/model.py:forward"]
example_phase = "forward"
[[phase]]
name = "mine.score"
comment = "My scores."
phase = "reward"
frames = ["mine/score.py:score"]
rank = 1
example = ["mine/score.py:score"]
"""


def lengths() -> str:
    """Write a file of completion lengths."""
    return "[12, 40, 256, 17]"


def texts() -> list[str]:
    """Return the out-of-memory texts of the knowledge files, as their programs print them."""
    from tests.oom.wordings import EXAMPLES, NOT_MEMORY_EXAMPLES

    return [*(example.text for example in EXAMPLES.values()), *NOT_MEMORY_EXAMPLES.values()]
