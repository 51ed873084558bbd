"""The phase of a pasted traceback: the same table of stacks as attribution's, in every notation people paste."""

from __future__ import annotations

import html
import textwrap

import pytest

from memprof.attribution.rules import load_rules
from memprof.oom.explain import explain_log
from memprof.oom.facts import FailureFacts
from memprof.oom.failure import Failure, TracebackFrame
from memprof.oom.known_messages import DEVICE_FORMS
from memprof.oom.stack import phase_of

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of "
    "which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.06 GiB memory in use. Of the allocated "
    "memory 76.50 GiB is allocated by PyTorch, and 0.31 GiB is reserved by PyTorch but unallocated."
)
SITE = "/usr/lib/python3.11/site-packages/"
CALL = (SITE + "torch/nn/modules/module.py", "_call_impl")
ENGINE = (SITE + "torch/autograd/graph.py", "_engine_run_backward")

# outermost first
STACKS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "TRL, loss": (
        "forward",
        [
            ("train.py", "<module>"),
            (SITE + "trl/trainer/grpo_trainer.py", "compute_loss"),
            (SITE + "trl/trainer/grpo_trainer.py", "_get_per_token_logps"),
            CALL,
        ],
    ),
    "TRL, old log-probs": (
        "old_logprobs",
        [
            (SITE + "trl/trainer/grpo_trainer.py", "_generate_and_score_completions"),
            (SITE + "trl/trainer/grpo_trainer.py", "_get_per_token_logps_and_entropies"),
            CALL,
        ],
    ),
    "TRL, generation": (
        "generate",
        [
            (SITE + "trl/trainer/grpo_trainer.py", "_generate_and_score_completions"),
            (SITE + "transformers/generation/utils.py", "_sample"),
            CALL,
        ],
    ),
    "accelerate, backward": (
        "backward",
        [(SITE + "accelerate/accelerator.py", "backward"), (SITE + "torch/_tensor.py", "backward"), ENGINE],
    ),
    "DeepSpeed, step": (
        "optimizer_step",
        [
            (SITE + "transformers/trainer.py", "training_step"),
            (SITE + "accelerate/utils/deepspeed.py", "backward"),
            (SITE + "deepspeed/runtime/engine.py", "step"),
            (SITE + "deepspeed/runtime/engine.py", "_take_model_step"),
            (SITE + "deepspeed/runtime/zero/stage3.py", "step"),
            (SITE + "deepspeed/runtime/zero/stage3.py", "_optimizer_step"),
        ],
    ),
    "DeepSpeed, backward": (
        "backward",
        [
            (SITE + "accelerate/utils/deepspeed.py", "backward"),
            (SITE + "deepspeed/runtime/engine.py", "backward"),
            (SITE + "deepspeed/runtime/zero/stage3.py", "backward"),
            ENGINE,
        ],
    ),
    "DeepSpeed, start": (
        "load",
        [
            ("train.py", "main"),
            (SITE + "deepspeed/__init__.py", "initialize"),
            (SITE + "deepspeed/runtime/engine.py", "_configure_zero_optimizer"),
        ],
    ),
    "verl, update": (
        "forward",
        [
            (SITE + "verl/workers/fsdp_workers.py", "update_actor"),
            (SITE + "verl/workers/actor/dp_actor.py", "update_policy"),
            (SITE + "verl/workers/actor/dp_actor.py", "_forward_micro_batch"),
            CALL,
        ],
    ),
    "verl, update, backward": (
        "backward",
        [
            (SITE + "verl/workers/fsdp_workers.py", "update_actor"),
            (SITE + "verl/workers/actor/dp_actor.py", "update_policy"),
            (SITE + "torch/_tensor.py", "backward"),
            ENGINE,
        ],
    ),
    "verl, update, step": (
        "optimizer_step",
        [
            (SITE + "verl/workers/fsdp_workers.py", "update_actor"),
            (SITE + "verl/workers/actor/dp_actor.py", "update_policy"),
            (SITE + "verl/workers/actor/dp_actor.py", "_optimizer_step"),
            (SITE + "torch/optim/adamw.py", "step"),
        ],
    ),
    "verl, log-probs": (
        "old_logprobs",
        [
            (SITE + "verl/workers/fsdp_workers.py", "compute_log_prob"),
            (SITE + "verl/workers/actor/dp_actor.py", "compute_log_prob"),
            (SITE + "verl/utils/torch_functional.py", "logprobs_from_logits"),
        ],
    ),
    "verl, reference": (
        "reference_logprobs",
        [
            (SITE + "verl/workers/fsdp_workers.py", "compute_ref_log_prob"),
            (SITE + "verl/workers/actor/dp_actor.py", "compute_log_prob"),
            (SITE + "verl/workers/actor/dp_actor.py", "_forward_micro_batch"),
            CALL,
        ],
    ),
    "verl, rollout mode": (
        "weight_sync",
        [
            (SITE + "verl/workers/fsdp_workers.py", "rollout_mode"),
            (SITE + "verl/utils/fsdp_utils.py", "layered_summon_lora_params"),
        ],
    ),
    "slime, loss": (
        "forward",
        [
            ("/root/slime/slime/backends/megatron_utils/actor.py", "train_actor"),
            ("/root/slime/slime/backends/megatron_utils/loss.py", "policy_loss_function"),
            ("/root/slime/slime/utils/ppo_utils.py", "calculate_log_probs_and_entropy"),
        ],
    ),
    "slime, log-probs": (
        "old_logprobs",
        [
            ("/root/slime/slime/backends/megatron_utils/actor.py", "compute_log_prob"),
            ("/root/slime/slime/backends/megatron_utils/model.py", "forward_only"),
            CALL,
        ],
    ),
    "OpenRLHF, experience": (
        "old_logprobs",
        [("/openrlhf/trainer/ppo_utils/experience_maker.py", "make_experience_batch"), CALL],
    ),
    "saving": (
        "save",
        [
            (SITE + "transformers/trainer.py", "_save_checkpoint"),
            (SITE + "accelerate/accelerator.py", "get_state_dict"),
            (SITE + "torch/nn/modules/module.py", "state_dict"),
        ],
    ),
    "loading": (
        "load",
        [
            ("run.py", "<module>"),
            (SITE + "transformers/modeling_utils.py", "from_pretrained"),
            (SITE + "torch/nn/modules/module.py", "_apply"),
            (SITE + "torch/nn/modules/module.py", "convert"),
        ],
    ),
    "vLLM, start": (
        "load",
        [
            (SITE + "vllm/v1/worker/gpu_worker.py", "determine_available_memory"),
            (SITE + "vllm/v1/worker/gpu_model_runner.py", "profile_run"),
            CALL,
        ],
    ),
    "vLLM, wake": (
        "wake",
        [(SITE + "vllm/entrypoints/llm.py", "wake_up"), (SITE + "vllm/device_allocator/cumem.py", "create_and_map")],
    ),
    "vLLM, running": ("generate", [(SITE + "vllm/v1/worker/gpu_model_runner.py", "execute_model"), CALL]),
    "a loop of one's own": ("backward", [("nano.py", "train"), (SITE + "torch/_tensor.py", "backward"), ENGINE]),
}


def python_notation(stack: list[tuple[str, str]]) -> str:
    head = "Traceback (most recent call last):\n"
    return head + "".join(f'  File "{path}", line 12, in {name}\n    x = y(z)\n' for path, name in stack)


def rank_notation(stack: list[tuple[str, str]]) -> str:
    return "".join(f"[rank2]: {line}\n" for line in python_notation(stack).splitlines())


def tail_notation(stack: list[tuple[str, str]]) -> str:
    return python_notation(stack).split("\n", 1)[1]


def backwards_notation(stack: list[tuple[str, str]]) -> str:
    return "\n".join(reversed(tail_notation(stack).splitlines())) + "\n"


def ipython_notation(stack: list[tuple[str, str]]) -> str:
    rows = []
    for i, (path, name) in enumerate(stack):
        method = f"Trainer.{name}" if i else name
        rows.append(f"File {path}:12, in {method}(self, *args)\n     11 a\n---> 12 x = y(z)\n")
    return "---------------------------------------------------------------------------\n" + "\n".join(rows)


def old_ipython_notation(stack: list[tuple[str, str]]) -> str:
    return "\n".join(f"{path} in {name}(self, x)\n     11 a\n---> 12 x = y(z)\n" for path, name in stack)


def html_notation(stack: list[tuple[str, str]]) -> str:
    rows = []
    for path, name in stack:
        where = f'<span class="ansi-green-fg">{path}:12</span>'
        rows.append(f'File {where}, in <span class="ansi-cyan-fg">{html.escape(name)}</span><span>(self)</span>')
    return "<pre>" + "<br>\n".join(rows) + "</pre>\n"


def rich_notation(stack: list[tuple[str, str]]) -> str:
    width = 78
    lines = ["╭" + "─" * (width - 2) + "╮"]
    for path, name in stack:
        text = f"{path if path.startswith('/') else '/home/me/' + path}:12 in {name.strip('<>')}"
        pieces = textwrap.wrap(text, width - 4, break_on_hyphens=False)  # long words are folded, as rich does
        lines += [f"│ {piece:<{width - 4}} │" for piece in pieces]
        lines += [f"│ {'❱ 12 │   x = y(z)':<{width - 4}} │"]
    return "\n".join([*lines, "╰" + "─" * (width - 2) + "╯"]) + "\n"


def broken_notation(stack: list[tuple[str, str]]) -> str:
    """As a terminal of 60 columns cuts it, inside words, with a bar before each line."""
    text = python_notation(stack)
    return "".join(f"| {line[i : i + 60]}\n" for line in text.split("\n") for i in range(0, len(line), 60))


NOTATIONS = {
    "python": python_notation,
    "ranks": rank_notation,
    "tail": tail_notation,
    "ipython": ipython_notation,
    "old ipython": old_ipython_notation,
    "html": html_notation,
    "rich": rich_notation,
    "broken": broken_notation,
}


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize("name", STACKS)
def test_the_phase_is_told_in_every_notation(name: str, notation: str) -> None:
    phase, stack = STACKS[name]
    (failure,) = explain_log(NOTATIONS[notation](stack) + OOM + "\n").failures
    assert failure.phase == phase
    assert failure.rank == (2 if notation == "ranks" else None)


@pytest.mark.parametrize("name", STACKS)
def test_a_viewer_that_shows_the_newest_line_first(name: str) -> None:
    phase, stack = STACKS[name]
    (failure,) = explain_log(OOM + "\n" + backwards_notation(stack)).failures
    assert failure.phase == phase


def test_the_table_of_attribution_is_the_one_that_is_read() -> None:
    """Each phase rule's own example, put through the reader of pasted stacks."""
    for rule in load_rules().phases:
        if not rule.example or rule.outermost:
            continue
        frames = []
        for entry in reversed(rule.example):
            place, _, function = entry.rpartition(" ")
            path, _, line = place.rpartition(":")
            frames.append(TracebackFrame(path, int(line), function))
        expected = {"logprobs": "old_logprobs"}.get(rule.phase, rule.phase)
        assert phase_of(frames) == expected, rule.name


def logits(frames: list[TracebackFrame]) -> bool:
    failure = Failure(DEVICE_FORMS[0], "device", "CUDA", 1, OOM, frames=tuple(frames))
    return FailureFacts({}, failure).has("logits")


def test_logits_are_known_by_names_and_code() -> None:
    assert logits([TracebackFrame("a.py", 1, "selective_log_softmax")])
    assert logits([TracebackFrame("a.py", 1, "f", "x = compute(logits.clone())")])
    assert not logits([TracebackFrame("a.py", 1, "forward", "return F.linear(x, w)")])
    assert not logits([])


def test_a_lone_log_prob_frame_does_not_say_whose_pass_it_is() -> None:
    assert phase_of([TracebackFrame("/slime/utils/ppo_utils.py", 672, "calculate_log_probs_and_entropy")]) is None


def test_the_innermost_frame_of_ones_own_is_named() -> None:
    text = python_notation([("/home/me/run.py", "<module>"), ("/home/me/loss.py", "loss"), CALL]) + OOM
    assert explain_log(text).failures[0].frame == "/home/me/loss.py:12 loss"
