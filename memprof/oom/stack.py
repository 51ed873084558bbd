"""What a run was doing when it ran out of memory, from the traceback above the message."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Frame", "makes_logits", "own_frame", "phase_of"]

Frame = tuple[str, int, str]

# Innermost frames decide: the first of these that one of them matches. (part of the path, part of the function, phase)
_SIGNS = (
    ("torch/optim/", "", "optimizer_step"),
    ("bitsandbytes/optim/", "", "optimizer_step"),
    ("", "clip_grad_norm", "optimizer_step"),
    ("/vllm/", "", "generate"),
    ("/sglang/", "", "generate"),
    ("generation/utils.py", "", "generate"),
    ("cache_utils.py", "", "generate"),
    ("torch/autograd/graph.py", "", "backward"),
    ("", "backward", "backward"),
    ("", "_calculate_rewards", "reward"),
    ("", "from_pretrained", "load"),
    ("", "_load_state_dict", "load"),
    ("", "_init_optimizer_state", "optimizer_step"),
    ("", "compute_loss", "forward"),
    ("", "_compute_loss", "forward"),
    ("", "_get_per_token_logps", "forward"),
    ("torch/nn/modules/module.py", "_apply", "load"),
    ("torch/nn/modules/module.py", "", "forward"),
)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>", "\\site-packages\\")
_VOCABULARY = ("logits", "lm_head", "logps", "log_softmax", "cross_entropy", "entropy", "chunked")


def phase_of(frames: Sequence[Frame]) -> str | None:
    """The phase the traceback ended in, or None where nothing tells."""
    functions = [function for _, _, function in frames]
    scoring = any("_generate_and_score" in f for f in functions)
    if scoring and any("_get_per_token_logps" in f for f in functions):
        return "old_logprobs"
    for path_part, function_part, phase in _SIGNS:
        if any(path_part in path and function_part in function for path, _, function in frames):
            return phase
    return None


def makes_logits(frames: Sequence[Frame]) -> bool:
    """Whether what was asked for is likely as wide as the vocabulary."""
    return any(word in function.lower() for _, _, function in frames[-6:] for word in _VOCABULARY)


def own_frame(frames: Sequence[Frame]) -> str | None:
    """The innermost frame outside installed libraries, as ``file:line function``."""
    for path, line, function in reversed(frames):
        if not any(part in path.replace("\\", "/") or part in path for part in _LIBRARIES):
            return f"{path}:{line} {function}"
    return None
