"""Run a case and label what it allocates."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.truth.cases import Case
from benchmarks.truth.models import save_model, scale_for
from benchmarks.truth.replay.emit import Stream, build_stream
from benchmarks.truth.scale import Scale


def run_case(case: Case, layers: int | None = None) -> tuple[Stream, dict[str, Any]]:
    """Run a case and return the labelled stream with what the truth file says about it.

    Args:
        case: one of :data:`benchmarks.truth.cases.CASES`.
        layers: so many layers instead of the model's own.
    """
    import torch

    torch.set_num_threads(1)
    if case.plain is not None:
        return _run_plain(case, layers)
    return _run_trl(case, layers) if case.nano is None else _run_nano(case, layers)


def _run_trl(case: Case, layers: int | None) -> tuple[Stream, dict[str, Any]]:
    """Run TRL's trainer."""
    from benchmarks.truth.scripts import train_full_logits, train_grpo
    from benchmarks.truth.trace.harness import trace_trl

    script = train_full_logits if case.full_logits else train_grpo
    model = replace(case.model, layers=layers) if layers else case.model
    reward = replace(case.reward, layers=layers) if layers and case.reward else case.reward
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "policy", model, seed=0)
        judge = str(save_model(Path(folder) / "reward", reward, seed=1, labels=1)) if reward else None
        grpo = {"output_dir": folder + "/out", "max_completion_length": case.completion, "max_steps": 2,
                "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
                "disable_tqdm": True, "seed": 3, **case.grpo}

        def main() -> Any:
            return script.main(str(path), _prompts(case), grpo, case.lora, judge, case.on_cpu_first)

        tracer = trace_trl(model, main, lora=case.lora is not None,
                           trainer=getattr(script, "FullLogitsTrainer", None))
    models = [model, *([reward] if reward else [])]
    scale = scale_for(models, case.tokens, case.prompt, case.completion, case.batches())
    return build_stream(tracer, scale), _about(case, scale, ("torch", "transformers", "trl", "peft", "accelerate"))


def _run_nano(case: Case, layers: int | None) -> tuple[Stream, dict[str, Any]]:
    """Run the hand-written loop."""
    import torch

    from benchmarks.truth.scripts import nano_grpo
    from benchmarks.truth.trace.harness import trace_nano
    from benchmarks.truth.trace.nano import preparing

    assert case.nano is not None
    shapes = replace(case.model, layers=layers) if layers else case.model
    positions = case.prompt + case.completion
    width = shapes.heads * shapes.tiny_head_dim
    config = {
        "model": {"vocab": shapes.tiny_vocab, "dim": shapes.tiny_hidden, "layers": shapes.layers,
                  "heads": shapes.heads, "head_dim": shapes.tiny_head_dim, "hidden": shapes.tiny_ffn,
                  "positions": positions, "tied": shapes.tied},
        "device": "cpu", "dtype": torch.float32, "cache_dtype": torch.float32, "seed": 5, "steps": 2, "group": 4,
        "beta": 0.04, "optimizer": "adamw_foreach", "cache": "static", "autocast": False, "batch": 8, "micro": 8,
        "prompt": case.prompt, "new_tokens": case.completion, **case.nano,
    }
    for name in ("dtype", "cache_dtype"):
        if isinstance(config[name], str):
            config[name] = getattr(torch, str(config[name]))
    tracer = trace_nano(lambda: nano_grpo.main(config), preparing(nano_grpo))  # type: ignore[no-untyped-call]
    batches = {2**i for i in range(8) if 2**i <= int(config["batch"])} | {int(config["micro"])}
    wide = replace(shapes, extra={**shapes.extra, 3 * width: 3 * shapes.heads * shapes.head_dim})
    scale = scale_for([wide], case.tokens, case.prompt, case.completion, batches)
    return build_stream(tracer, scale), _about(case, scale, ("torch",))


def _run_plain(case: Case, layers: int | None) -> tuple[Stream, dict[str, Any]]:
    """Run one of the plain loops."""
    from benchmarks.truth.scripts import plain_loops
    from benchmarks.truth.trace.harness import trace_nano
    from benchmarks.truth.trace.plain import preparing

    assert case.plain is not None
    shapes = replace(case.model, layers=layers) if layers else case.model
    config = {
        "model": {"vocab": shapes.tiny_vocab, "dim": shapes.tiny_hidden, "layers": shapes.layers,
                  "heads": shapes.heads, "head_dim": shapes.tiny_head_dim, "hidden": shapes.tiny_ffn},
        "head": "linear", "direct": False, "new_tokens": 0, "passes": 1, "reference": None, "optimizer": "adamw",
        "steps": 3, "batch": 6, "prompt": case.prompt, "rebinds": False, **case.plain,
    }
    tracer = trace_nano(lambda: plain_loops.main(config), preparing(plain_loops))  # type: ignore[no-untyped-call]
    batches = {1, 2, 3, 6}
    scale = scale_for([shapes], case.tokens, case.prompt, case.completion, batches)
    return build_stream(tracer, scale), _about(case, scale, ("torch",))


def _about(case: Case, scale: Scale, packages: tuple[str, ...]) -> dict[str, Any]:
    """Say what a truth file says of its run."""
    return {
        "run": case.name,
        "model": case.model.name,
        "versions": {name: version(name) for name in packages},
        "about": case.about,
        "tokens_per_tiny_token": case.tokens,
        "guessed_extents": {f"{shape}[{at}]": n for (shape, at), n in scale.guessed.most_common(8)},
    }


def _prompts(case: Case) -> list[str]:
    """Make prompts of ``case.prompt`` words; every third one shorter where the case is padded."""
    out = []
    for i in range(16):
        n = case.prompt - (5 if case.padded and i % 3 == 1 else 0)
        out.append(" ".join(f"w{(i * 37 + j * 11) % 900 + 5}" for j in range(n)))
    return out
