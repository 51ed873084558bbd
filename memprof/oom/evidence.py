"""What is known of one failure, by the names that the knowledge files use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from memprof.allocator.settings import AllocatorSettings
from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes
from memprof.oom.expressions import Scope
from memprof.oom.failure import Failure, Frame
from memprof.oom.frameworks import PLAIN, Names
from memprof.units import GIB

__all__ = ["scope_of", "scope_of_recording"]

# As torch comes; a message does not say what was set.
_ALLOCATOR = AllocatorSettings()
_INNER, _ENGINES_INNER = 6, 12
# What torch's own message proposes is not what was set.
_PROPOSED = re.compile(
    r"try\s{1,4}setting\s{1,4}\S{1,80}|use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0\.0|consider \S{1,80}"
    r"|please set \S{1,80}",
    re.I,
)
_TRAINING = re.compile(
    r"\bepochs?\b|training_step|trainer\.train|\btrain\w{0,20}\.py|global[_ ]step|grad(?:ient)?_accum|micro_?batch"
    r"|\.backward\(|\boptimizer\b|fine-?tun|\btrain_loss|per_device_train",
    re.I,
)
_TRAINING_PHASES = ("backward", "optimizer_step", "old_logprobs", "reference_logprobs", "reward", "weight_sync")
_ENGINES = re.compile(r"/(?:vllm|sglang|text_generation_server|lmdeploy|tensorrt_llm|vllm_ascend)/")
_LOADING = re.compile(
    r":(?:from_pretrained|load_state_dict|load_checkpoint|_?load_model|load_weights|_load_state_dict_into_\w{1,40}"
    r"|load_shard_checkpoint|load_pretrained_model|create_weights|patch_weight_to_device|convert|cast_to_device|cuda|to)$"
)
_STARTING = re.compile(r"profile_run|_dummy_run|determine_|capture_|warm_?up")
_GENERATING = re.compile(r"generation/utils|:generate$|model\.generate\(")
_WINDOWS = re.compile(r"(?<![A-Za-z])[A-Z]:[\\/](?!/)|\bwin32\b|\bWindows\b")
_WSL = re.compile(r"\bWSL2?\b|microsoft-standard|/mnt/[c-e]/|wslconfig", re.I)
_UNIFIED = re.compile(r"strix|gfx115[01]|jetson|\borin\b|\bGB10\b|dgx spark|unified memory", re.I)
_SLEEPING = re.compile(
    r"sleep_?mode\W{1,4}true|VLLM_STANDBY\W{1,5}1|cumem|sleep_level\W{1,4}[12]|free_cache_engine\W{1,4}true"
    r"|enable_memory_saver\W{1,4}true|wake_up|torch_memory_saver",
    re.I,
)
_TORCH = re.compile(r"\b(?:py)?torch(?: version)?(?:==|[ :=@v-]{1,3})(\d)\.(\d{1,2})(?!\d)", re.I)
_ONE = re.compile(
    r"(?:micro_?batch|per_device_train_batch_size|train_micro_batch_size_per_gpu|(?<![A-Za-z_])train_batch_size)\w{0,20}"
    r"[\"']?\s{0,3}(?:->|=|:|\bto\b)"
    r"\s{0,3}[\"']?1(?![\d.])",
    re.I,
)


def scope_of(failure: Failure, parts: Parts, phase: str | None, logits: bool, names: Names) -> Scope:
    """Return the numbers, flags, settings' names and functions that conditions and templates may ask for."""
    surroundings = _PROPOSED.sub(" ", f"{failure.head}\n{failure.around}")
    values = {
        **failure.facts,
        **_numbers(failure, parts),
        **_flags(failure, parts, phase, names, surroundings),
        **{f"setting_{word}": text for word, text in {**PLAIN.words, **names.words}.items()},
        "form": failure.form.id,
        "kind": failure.kind,
        "program": failure.form.program,
        "backend": failure.backend,
        "phase": phase,
        "logits": logits,
        "rank": failure.rank,
        "framework": names.framework or None,
    }
    if names.framework:  # another framework's words would be foreign to it
        own = {f"setting_{word}" for word in (*names.words, "micro_batch", "checkpointing", "optimizer", "offload")}
        values = {k: v for k, v in values.items() if not k.startswith("setting_") or k in own}
    if failure.kind != "device":
        values.update({name: failure.facts[name] for name in ("total", "free") if name in failure.facts})
    return Scope(values, _functions(failure.frames, failure.text, surroundings, values))


def scope_of_recording(names: Names, phase: str, training: bool, alloc_conf: str = "", **more: Any) -> Scope:
    """Return what a recording tells a change; a setting that the framework has no word for is unknown.

    Args:
        names: the framework whose files the stacks show. An engine's settings say nothing of a training beside it.
        phase: the phase of the peak.
        training: gradients were seen.
        alloc_conf: the allocator's settings.
        more: what the change's own words ask for, such as ``held``, the bytes that it is about.
    """
    words = dict(names.words) if names.framework else dict(PLAIN.words)
    if names.kind == "serving":  # its word for checkpointing is about graphs
        words = {**words, **PLAIN.words} if training else {k: v for k, v in words.items() if k != "checkpointing"}
    values = {
        **{f"setting_{word}": text for word, text in words.items()},
        "backend": "CUDA",
        "framework": names.framework or None,
        "phase": phase,
        "training": training,
        "serving": names.kind == "serving" and not training,
        "images": names.kind == "images",
        "loading": phase == "load",
        "sleeping_engine": names.sleeps,
        "torch": None,
        "torch_most": None,
        **more,
    }
    return Scope(values, _functions((), "", alloc_conf, values))


def _numbers(failure: Failure, parts: Parts) -> dict[str, Any]:
    asked, allocated = failure.requested, parts.allocated
    return {
        **{k: v for k, v in asdict(parts).items() if k not in ("processes", "contradictions", "own_process")},
        "asked": asked,
        "total": failure.total,
        "free": free_bytes(failure),
        "allowed": failure.allowed,
        "other": failure.other,
        "private_pools": failure.private_pools,
        "missing": missing_bytes(failure),
        "idle": parts.cached or 0,
        "live": None if not failure.total or allocated is None else allocated / failure.total,
        "piece": None if asked is None else _ALLOCATOR.segment_size(_ALLOCATOR.round_size(asked)),
        "processes": len(parts.processes),
        "silent": sum(not held for _, held in parts.processes),
        "pid": parts.processes[0][0] if len(parts.processes) == 1 else failure.facts.get("pid"),
    }


def _flags(failure: Failure, parts: Parts, phase: str | None, names: Names, surroundings: str) -> dict[str, Any]:
    frames = [_place(frame) for frame in failure.frames]
    text = "\n".join([*frames, failure.text, surroundings])
    in_engine = any(_ENGINES.search(place) for place in frames[-_ENGINES_INNER:])
    inner = "\n".join(place.split(" ")[0] for place in frames[-_INNER:])
    images = names.kind == "images"
    training = not images and (
        phase in _TRAINING_PHASES
        or (names.kind == "training" and bool(names.framework))
        or _TRAINING.search(text) is not None
    )
    round_card = failure.backend == "HIP" and (failure.total or 0) >= 32 * GIB and not (failure.total or 1) % GIB
    loading = (phase == "load" or _LOADING.search("\n".join(inner.split("\n")[-3:])) is not None) and not (
        _STARTING.search(inner)
    )
    return {
        "training": training,
        "serving": in_engine or names.kind == "serving",
        "images": images,
        "loading": loading,
        "generating": phase == "generate" or _GENERATING.search("\n".join(frames)) is not None,
        "windows": _WINDOWS.search(text) is not None,
        "wsl": _WSL.search(text) is not None,
        "unified": round_card or _UNIFIED.search(text) is not None,
        "tpu": "hbm" in failure.text.lower() or re.search(r"\bTPU\b", text) is not None,
        "shares_device": re.search(r"\b(?:import torch|torch\.|pytorch|tensorflow as tf)", text, re.I) is not None,
        "sleeping_engine": names.sleeps or _SLEEPING.search(surroundings) is not None,
        "expandable_on": re.search(r"expandable_segments\W{0,4}true", surroundings, re.I) is not None,
        "micro_batch_is_one": _ONE.search(surroundings) is not None,
        "torch": _version(text),
        "torch_most": _oldest_wording(failure),
    }


def _version(text: str) -> int | None:
    match = _TORCH.search(text)
    return int(match[1]) * 100 + int(match[2]) if match else None


def _oldest_wording(failure: Failure) -> int | None:
    """Return the newest version that can word it so; None where any can."""
    if failure.backend not in ("CUDA", "HIP"):
        return None
    text = failure.text.lower()
    if "already allocated" in text:
        return 103 if "cached" in text else 200
    return 201 if "capacty" in text else None


def _place(frame: Frame) -> str:
    return f"{frame.path}:{frame.function}"


def _functions(
    frames: Sequence[Frame], message: str, surroundings: str, values: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    places = [_place(frame) for frame in frames]
    code = frames[-1].code if frames else ""

    def found(pattern: str, where: str) -> bool:
        return re.search(pattern, where) is not None

    def torch_before(major: int, minor: int) -> bool:
        known = values["torch"] or values["torch_most"]
        return known is not None and known < major * 100 + minor

    def text(pattern: str) -> str | None:
        match = re.search(pattern, f"{surroundings}\n{message}")
        return match[1] if match else None

    def number(pattern: str) -> float | None:
        match = text(pattern)
        return None if match is None else float(match)

    def join(*pieces: Any) -> str | None:
        return None if any(p is None for p in pieces) else "".join(str(p) for p in pieces)

    return {
        "known": lambda value: value is not None,
        "first": lambda *options: next((o for o in options if o is not None), None),
        "min": lambda *v: None if any(x is None for x in v) else min(v),
        "max": lambda *v: None if any(x is None for x in v) else max(v),
        "floor": lambda v: None if v is None else math.floor(v),
        "ceil": lambda v: None if v is None else math.ceil(v),
        "sqrt": lambda v: None if v is None else math.sqrt(v),
        "in_gib": lambda v: None if v is None else v / GIB if v > 1e6 else v,
        "join": join,
        "frames": lambda pattern: found(pattern, "\n".join(places)),
        "inner": lambda pattern: found(pattern, "\n".join(p.rpartition("/")[2] for p in places[-_INNER:])),
        "code": lambda pattern: found(pattern, code),
        "code_line": lambda pattern: code.strip()[:90] if code and found(pattern, code) else None,
        "log": lambda pattern: found(pattern, f"{surroundings}\n{message}"),
        "set_in_log": lambda pattern: found(f"(?i){pattern}", surroundings),
        "torch_before": torch_before,
        "text": text,
        "number": number,
    }
