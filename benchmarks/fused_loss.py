"""The fused log-probabilities beside TRL's chunked path: products, peak bytes, time, error.

    python -m benchmarks.fused_loss [--tokens 256] [--hidden 576] [--vocabulary 49152] [--pairs 5]
        [--device cuda] [--dtype bfloat16] [--json FILE]

The head is SmolLM2's unless told otherwise. Forward and backward of one sum of log-probabilities, with a frozen and a
trainable head: by TRL's ``ChunkedLogProbFunction`` as GRPO calls it, by ours with the gradient in the backward, and by
ours with the gradient in the forward. Products are counted by torch's FLOP counter, one being ``N x H x V``;
peak bytes are those live in memprof's tensor trace beside the inputs (on CUDA, the allocator's peak); time is CPU
seconds in interleaved pairs (on CUDA, between events; not run there yet). ``bf16_error``: relative error of
log-probabilities and of the hidden states' gradient against float64.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.measure import interleaved, ratio, write_result

VOCABULARY_CHUNK = 32768  # trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE


def inputs(n: int, h: int, v: int, dtype: torch.dtype, trainable: bool, device: str) -> tuple[Any, Any, Any]:
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g, device=device) * h**-0.5).to(dtype).requires_grad_(trainable)
    return hidden, weight, torch.randint(v, (n,), generator=g, device=device)


def paths() -> dict[str, Callable[..., Any]]:
    """Name to a function of (hidden, weight, targets) that runs forward and backward and returns log-probabilities."""
    from trl.kernels import ChunkedLogProbFunction

    from memprof.grpo.fused_loss import fused_linear_logprobs

    def trl(hidden: Any, weight: Any, targets: Any) -> Any:
        logps = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, VOCABULARY_CHUNK, None, 1.0, ())[0]
        logps.sum().backward()
        return logps

    def in_backward(hidden: Any, weight: Any, targets: Any) -> Any:
        found = fused_linear_logprobs(hidden, weight, None, targets)
        found.logps.sum().backward()
        return found.logps

    def in_forward(hidden: Any, weight: Any, targets: Any) -> Any:
        found = fused_linear_logprobs(
            hidden, weight, None, targets, grad_fn=lambda logps, *_: (torch.ones_like(logps), None)
        )
        assert found.anchor is not None
        found.anchor.backward()
        return found.logps

    return {"trl": trl, "in_backward": in_backward, "in_forward": in_forward}


def products(run: Callable[..., Any], tensors: Any) -> float:
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    hidden, weight, _ = tensors
    count: Any = flop_registry[torch.ops.aten.addmm]
    count._get_raw = True  # it takes the tensors themselves, as the registry's do
    # TRL adds its sums up in place, which torch does not count by itself.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: count}) as counter:
        run(*tensors)
    return float(counter.get_total_flops()) / (2 * hidden.shape[0] * hidden.shape[1] * weight.shape[0])


def peak_bytes(run: Callable[..., Any], tensors: Any) -> int:
    """Live at the peak, without the inputs."""
    import memprof

    gc.collect()
    held = sum(t.numel() * t.element_size() for t in tensors)
    if tensors[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        run(*tensors)
        return torch.cuda.max_memory_allocated() - held
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pickle"
        with memprof.record(path):
            run(*tensors)
        peak = memprof.analyze(memprof.load_snapshot(path)).to_dict()["peak"]["allocated_bytes"]
    return int(peak) - held


def timed(run: Callable[..., Any], tensors: Any) -> dict[str, float]:
    for t in tensors[:2]:
        t.grad = None
    if tensors[0].is_cuda:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run(*tensors)
        after.record()
        torch.cuda.synchronize()
        return {"seconds": before.elapsed_time(after) / 1000}
    start = time.process_time()
    run(*tensors)
    return {"seconds": time.process_time() - start}


def errors(run: Callable[..., Any], n: int, h: int, v: int, device: str) -> dict[str, float]:
    hidden, weight, targets = inputs(n, h, v, torch.bfloat16, False, device)
    logps = run(hidden, weight, targets)
    true = hidden.detach().double().requires_grad_()
    meant = torch.log_softmax(true @ weight.double().t(), -1).gather(1, targets[:, None]).squeeze(1)
    meant.sum().backward()
    assert hidden.grad is not None
    assert true.grad is not None
    return {
        "logps": float((logps.detach().double() - meant.detach()).norm() / meant.detach().norm()),
        "hidden_gradient": float((hidden.grad.double() - true.grad).norm() / true.grad.norm()),
    }


@click.command()
@click.option("--tokens", default=256, show_default=True)
@click.option("--hidden", default=576, show_default=True)
@click.option("--vocabulary", default=49152, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(tokens: int, hidden: int, vocabulary: int, pairs: int, device: str, dtype: str, path: Path | None) -> None:
    """Compare the fused log-probabilities with TRL's."""
    runs = paths()
    size: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    result: dict[str, Any] = {**size, "pairs": pairs, "device": device, "dtype": dtype}
    for name, trainable in (("frozen_head", False), ("trainable_head", True)):
        tensors = inputs(tokens, hidden, vocabulary, getattr(torch, dtype), trainable, device)
        rows: dict[str, dict[str, float]] = {}
        for kind, run in runs.items():
            for t in tensors[:2]:
                t.grad = None
            rows[kind] = {"products": round(products(run, tensors), 3)}
            for t in tensors[:2]:
                t.grad = None
            rows[kind]["peak_bytes"] = peak_bytes(run, tensors)
        times = interleaved({kind: lambda r=run: timed(r, tensors) for kind, run in runs.items()}, pairs)  # type: ignore[misc]  # noqa: B023
        for kind in runs:
            rows[kind]["seconds_over_trl"] = round(ratio(times, kind, "trl", "seconds"), 3)
            rows[kind]["seconds_median"] = round(sorted(t["seconds"] for t in times[kind])[pairs // 2], 6)
        result[name] = rows
    small = max(16, tokens // 8)
    result["bf16_error"] = {kind: errors(run, small, hidden, vocabulary, device) for kind, run in runs.items()}
    write_result(result, path)


if __name__ == "__main__":
    main()
