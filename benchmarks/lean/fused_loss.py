"""Measure the fused log-probabilities, TRL's chunks, Liger's and plain logits: products, bytes, time, error.

    python -m benchmarks.lean fused-loss [--tokens 256] [--hidden 576] [--vocabulary 49152] [--pairs 5]
        [--device cuda] [--dtype bfloat16] [--json FILE]

The head is SmolLM2's unless told otherwise. Forward and backward of one sum of log-probabilities, with a frozen and a
trainable head, by

- ``trl``: TRL's ``ChunkedLogProbFunction`` as GRPO calls it;
- ``liger``: Liger's fused linear GRPO loss as recipe ``liger`` calls it (eight sequences where the tokens allow it, not
  compiled), with advantages that make its gradient that of the sum. It needs ``pip install --no-deps liger-kernel``:
  this loss is plain torch, so that neither a GPU nor the Triton it asks for must be there;
- ``plain``: logits in full, as recipe ``trl-full-logits`` and TRL's older releases take their log-probabilities;
- ``in_backward``, ``in_forward``: ours with the gradient in the backward and in the forward.

A path that cannot run says why in its row (``{"error": ...}``), and the others go on. Products are counted by torch's
FLOP counter, one being ``N x H x V``; peak bytes are those live in memprof's tensor trace beside the inputs (on CUDA,
the allocator's peak); time is CPU seconds in interleaved rounds (on CUDA, between events; not run there yet).
``bf16_error``: relative error of log-probabilities (Liger returns none) and of the gradients of hidden states and
of a trainable head against float64.
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
PATHS = ("trl", "liger", "plain", "in_backward", "in_forward")
HEADS = {"frozen_head": False, "trainable_head": True}
_EXACT_ROWS = 256  # of float64 logits at a time
_MOST_COMPARED = 1024  # tokens whose error is looked at: float64 is slow on most GPUs


def inputs(n: int, h: int, v: int, dtype: torch.dtype, trainable: bool, device: str) -> tuple[Any, Any, Any]:
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, h, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(v, h, generator=g, device=device) * h**-0.5).to(dtype).requires_grad_(trainable)
    return hidden, weight, torch.randint(v, (n,), generator=g, device=device)


def sequences(tokens: int) -> int:
    """Return how many completions the tokens are dealt to: eight, or as many of that as divide them."""
    return next(k for k in (8, 4, 2, 1) if tokens % k == 0)


def paths() -> dict[str, Callable[..., Any]]:
    """Name to a function of (hidden, weight, targets) that runs forward and backward.

    They return the log-probabilities, or None where there are none to be had.
    """
    return dict(zip(PATHS, (_trl, _liger, _plain, _in_backward, _in_forward), strict=True))


def _trl(hidden: Any, weight: Any, targets: Any) -> Any:
    from trl.kernels import ChunkedLogProbFunction

    logps = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, VOCABULARY_CHUNK, None, 1.0, ())[0]
    logps.sum().backward()
    return logps


def _liger(hidden: Any, weight: Any, targets: Any) -> None:
    """Run Liger's loss as a sum: on-policy the ratio is 1, so advantages of ``-tokens`` cancel its division."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    n = targets.shape[0]
    rows = sequences(n)
    ids = targets.view(rows, -1)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo", temperature=1.0)
    value, _ = loss(
        _input=hidden.view(rows, n // rows, -1),
        lin_weight=weight,
        selected_token_ids=ids,
        attention_mask=torch.ones_like(ids),
        advantages=torch.full((rows,), -float(n), device=ids.device),
    )
    value.backward()


def _plain(hidden: Any, weight: Any, targets: Any) -> Any:
    from memprof.simulate.trainer.recipes import selected_logprobs

    rows = sequences(targets.shape[0])
    logits = torch.nn.functional.linear(hidden, weight).view(rows, -1, weight.shape[0])
    logps = selected_logprobs(logits, targets.view(rows, -1)).view(-1)
    logps.sum().backward()
    return logps


def _in_backward(hidden: Any, weight: Any, targets: Any) -> Any:
    from memprof.grpo.loss.chunked_loss import fused_linear_logprobs

    found = fused_linear_logprobs(hidden, weight, None, targets)
    found.logps.sum().backward()
    return found.logps


def _in_forward(hidden: Any, weight: Any, targets: Any) -> Any:
    from memprof.grpo.loss.chunked_loss import fused_linear_logprobs

    found = fused_linear_logprobs(
        hidden, weight, None, targets, grad_fn=lambda logps, *_: (torch.ones_like(logps), None)
    )
    assert found.anchor is not None
    found.anchor.backward()
    return found.logps


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
    """Return live bytes at the peak, without the inputs."""
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


def exact(hidden: Any, weight: Any, targets: Any) -> dict[str, Any]:
    """Return log-probabilities and both gradients in float64, some rows at a time."""
    h = hidden.detach().double().requires_grad_()
    w = weight.detach().double().requires_grad_()
    logps = []
    for rows in torch.arange(targets.shape[0], device=targets.device).split(_EXACT_ROWS):
        told = torch.log_softmax(h[rows] @ w.t(), -1).gather(1, targets[rows, None]).squeeze(1)
        told.sum().backward()
        logps.append(told.detach())
    return {"logps": torch.cat(logps), "hidden_gradient": h.grad, "head_gradient": w.grad}


def errors(runs: dict[str, Callable[..., Any]], n: int, h: int, v: int, device: str) -> dict[str, Any]:
    """Return for each path the norm of what is wrong in bf16 over the norm of what is right."""
    tensors = inputs(n, h, v, torch.bfloat16, True, device)
    meant = exact(*tensors)
    found: dict[str, Any] = {}
    for kind, run in runs.items():
        _forget(tensors)
        logps = run(*tensors)
        told = {"logps": logps, "hidden_gradient": tensors[0].grad, "head_gradient": tensors[1].grad}
        found[kind] = {
            name: None if x is None else float((x.detach().double() - meant[name]).norm() / meant[name].norm())
            for name, x in told.items()
        }
    return found


def _forget(tensors: Any) -> None:
    for t in tensors[:2]:
        t.grad = None


def alone(run: Callable[..., Any], tensors: Any) -> dict[str, Any]:
    """Measure a path's products and peak; say why it cannot run, where it cannot."""
    try:
        _forget(tensors)
        found: dict[str, Any] = {"products": round(products(run, tensors), 3)}
        _forget(tensors)
        return {**found, "peak_bytes": peak_bytes(run, tensors)}
    except ModuleNotFoundError as error:
        needed = (error.name or "").partition(".")[0].replace("_", "-")
        return {"error": f"not run: {needed} is not installed"}
    except torch.OutOfMemoryError as error:
        told = {"error": f"not run: {str(error).splitlines()[0]}"}
    # Outside the handler: the exception's frames hold what was being computed.
    _forget(tensors)
    gc.collect()
    if tensors[0].is_cuda:
        torch.cuda.empty_cache()
    return told


def compared(runs: dict[str, Callable[..., Any]], tensors: Any, pairs: int) -> dict[str, dict[str, Any]]:
    """Measure each path: alone first, then those that ran in turn, for their time."""
    rows = {kind: alone(run, tensors) for kind, run in runs.items()}
    ran = {kind: run for kind, run in runs.items() if "error" not in rows[kind]}
    times = interleaved({kind: lambda r=run: timed(r, tensors) for kind, run in ran.items()}, pairs)  # type: ignore[misc]
    for kind in ran:
        if "trl" in ran:
            rows[kind]["seconds_over_trl"] = round(ratio(times, kind, "trl", "seconds"), 3)
        rows[kind]["seconds_median"] = round(sorted(t["seconds"] for t in times[kind])[pairs // 2], 6)
    return rows


@click.command()
@click.option("--tokens", default=256, show_default=True)
@click.option("--hidden", default=576, show_default=True)
@click.option("--vocabulary", default=49152, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(tokens: int, hidden: int, vocabulary: int, pairs: int, device: str, dtype: str, path: Path | None) -> None:
    """Compare the fused log-probabilities with TRL's, Liger's and plain logits."""
    runs = paths()
    size: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    result: dict[str, Any] = {**size, "pairs": pairs, "device": device, "dtype": dtype}
    for name, trainable in HEADS.items():
        tensors = inputs(tokens, hidden, vocabulary, getattr(torch, dtype), trainable, device)
        result[name] = compared(runs, tensors, pairs)
        del tensors
    able = {kind: run for kind, run in runs.items() if all("error" not in result[name][kind] for name in HEADS)}
    small = min(max(16, tokens // 8), _MOST_COMPARED)
    result["bf16_error"] = errors(able, small, hidden, vocabulary, device)
    write_result(result, path)
