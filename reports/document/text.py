"""Write words and figures as a reader sees them, and make names from strangers harmless."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from memprof.units import GIB, format_bytes, format_gib
from memprof.vocabulary import CATEGORY_LABELS, GROUP_LABELS, Group, phase_words

# Characters that print nothing but change how their neighbours print: controls (ANSI escapes among them), surrogates,
# bidirectional overrides and the like ("format" characters), line and paragraph separators.
_HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def plain(value: object) -> str:
    """Write ``value`` as one harmless line: control, bidirectional and separator characters as escapes."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(c) if unicodedata.category(c) in _HARMFUL else c for c in text)


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def size(n_bytes: int) -> str:
    """Write a size with its unit, the largest that leaves a digit before the point."""
    return format_bytes(n_bytes)


def signed_gib(n_bytes: int) -> str:
    """Write GiB with two decimals and a sign (a true minus); what rounds to nothing has none."""
    if abs(n_bytes) < 0.005 * GIB:
        return "0.00"
    return f"{'−' if n_bytes < 0 else '+'}{format_gib(abs(n_bytes))}"


def thousands(number: int) -> str:
    """Write an integer in groups of three digits."""
    return f"{number:,}".replace(",", "\u202f")


def duration(us: int) -> str:
    """Write microseconds in the unit a person would choose."""
    for factor, unit in ((1_000_000, "s"), (1_000, "ms")):
        if us >= factor:
            value = us / factor
            if unit == "s" and value >= 120:
                return f"{int(value // 60)} min {int(value % 60):02d} s"
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{us} µs"


def time_taken(us: int | None, estimated: bool) -> str:
    """Write a phase's time: as measured, as estimated, or a dash where there is neither."""
    if us is None:
        return "–"
    return f"≈ {duration(us)}" if estimated else duration(us)


def time_heading(estimated: bool) -> str:
    """Head the phases' times: measured ones are sums over a run, estimated ones are one step's."""
    return "A step" if estimated else "Time"


def sentence_list(words: Iterable[str]) -> str:
    """Join words as ``a``, ``a and b``, ``a, b and c``."""
    parts = list(words)
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def short_path(frame: str, keep: int = 2) -> str:
    """Shorten a frame ``path:line function`` to the last ``keep`` parts of its path."""
    location, _, function = frame.partition(" ") if "\\" not in frame else frame.rpartition(" ")
    if not location:
        return frame
    parts = location.replace("\\", "/").split("/")
    return "/".join(parts[-keep:]) + (f" {function}" if function else "")


CATEGORY_WORDS: dict[str, str] = {
    "weights": "Parameters and buffers of the policy.",
    "adapters": "LoRA and other PEFT parameters, with their modules_to_save copies.",
    "weight_casts": "Copies of weights in another dtype: autocast's cache, dequantised blocks, an fp32 head.",
    "reference_model": "Parameters of the frozen reference policy.",
    "reward_model": "Parameters of reward or judge models.",
    "value_model": "Parameters of a critic.",
    "gradients": "Gradients of trainable parameters, in flight or in .grad.",
    "optimizer_state": "Moments, master weights and other state the optimizer keeps.",
    "activations": "Outputs of a model's forward: kept for backward, recomputed, or passing through.",
    "activation_gradients": "Gradients of activations, and scratch inside backward.",
    "loss_logits": "Tensors as wide as the vocabulary, and the temporaries of log-probs and loss around them.",
    "kv_cache": "Keys and values kept by generation.",
    "inference_engine": "Weights, graphs and buffers of an in-process inference engine.",
    "inputs": "Token ids, masks, rewards and log-probs kept between phases.",
    "temporaries": "Scratch outside forward and backward: the optimizer, clipping, and the like.",
    "communication": "Buffers of all-gather and reduce.",
    "workspace": "cuBLAS and cuDNN workspaces.",
    "unattributed": "Bytes that no evidence explains; they are never hidden.",
}

GROUP_WORDS: dict[str, str] = {
    "training": "Weights, gradients, optimizer state, activations and scratch.",
    "grpo_loss": "Vocabulary-wide tensors of the GRPO loss and of log-probs.",
    "reference_and_reward": "Frozen models held beside the policy.",
    "inference": "An in-process engine: its copy of the weights, graphs and buffers.",
    "kv_cache": "Keys and values of generation.",
    "unattributed": "Bytes that no evidence explains.",
    "total": "Sum of the rows above.",
}

EVIDENCE_WORDS: dict[str, str] = {
    "owner": "a live tensor was known to be this",
    "metadata": "tagged when it was allocated",
    "stack": "a named rule matched its stack",
    "lifetime": "when it was born and when it died",
    "fingerprint": "its set of sizes equals a known one",
    "shape": "its shape",
    "none": "nothing explains it",
}

KIND_WORDS: dict[str, str] = {
    "cuda": "recorded by the CUDA caching allocator",
    "trace": "tensor trace (every storage's birth and death, no allocator)",
    "simulated": "simulated on fake tensors",
}

HISTORY_WORDS: dict[str, str] = {
    "complete": "complete: recording covers the whole run it describes",
    "started_late": "recording began after memory was already in use",
    "truncated": "the ring buffer overflowed; the oldest events are gone",
    "none": "no history: the allocator's state only",
}

# Bottom to top in stacked charts: what stays below, what comes and goes above.
STACK_ORDER: tuple[str, ...] = (
    "weights", "adapters", "reference_model", "reward_model", "value_model", "optimizer_state", "inference_engine",
    "workspace", "inputs", "kv_cache", "gradients", "weight_casts", "activations", "loss_logits",
    "activation_gradients", "temporaries", "communication", "unattributed",
)  # fmt: skip

_PHASE_SHORT = {
    "generate": "gen",
    "reward": "rew",
    "old_logprobs": "old lp",
    "reference_logprobs": "ref lp",
    "forward": "fwd",
    "backward": "bwd",
    "optimizer_step": "opt",
    "weight_sync": "sync",
    "evaluate": "eval",
}
_CATEGORY_LABELS = {str(k): v for k, v in CATEGORY_LABELS.items()}
_GROUP_LABELS = {str(k): v for k, v in GROUP_LABELS.items()}
assert set(CATEGORY_WORDS) == set(_CATEGORY_LABELS) == set(STACK_ORDER)
assert set(GROUP_WORDS) == {str(g) for g in Group}


def humanise(identifier: str) -> str:
    """Write an id as words: ``no_grad`` as ``no grad``."""
    return identifier.replace("_", " ")


def phase_label(phase: str) -> str:
    """Write a phase as a heading."""
    return phase_words(phase).capitalize()


def phase_short(phase: str) -> str:
    """Write a phase in a few letters, for narrow places."""
    return _PHASE_SHORT.get(phase, humanise(phase))


def where_words(phase: str | None, step: int | None) -> str:
    """Name an instant inside a sentence: its phase, and its step where that is known."""
    known = phase_label(phase).lower() if phase else "an unknown phase"
    return plain(f"{known}, step {step}" if step is not None else known)


def category_label(category: str) -> str:
    """Write a category as a heading."""
    return _CATEGORY_LABELS.get(category, humanise(category).capitalize())


def group_label(group: str) -> str:
    """Write a group as a heading."""
    return _GROUP_LABELS.get(group, humanise(group).capitalize())
