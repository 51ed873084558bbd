"""Triton kernels: compiled for the card, launched nowhere, computed all the same; so TRL's losses are real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
triton = pytest.importorskip("triton")

from memprof import MemProfCallback  # noqa: E402
from memprof.emulate.launch import environment  # noqa: E402
from memprof.emulate.notes import UNCOMPUTED, uncomputed_notes  # noqa: E402
from tests.cuda.emulator.a_kernel import shifted_softmax, shifted_softmax_in_torch  # noqa: E402
from tests.integrations import runs  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


def test_any_kernel_with_a_small_grid_is_interpreted() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 40, device="cuda")
    out = torch.empty_like(x)
    shifted_softmax[(6,)](x, out, 40, 1.5, BLOCK=64)
    torch.testing.assert_close(out.cpu(), shifted_softmax_in_torch(x.cpu(), 1.5))


def test_a_kernel_with_a_large_grid_is_left_and_counted() -> None:
    x = torch.randn(2000, 8, device="cuda")
    out = torch.zeros_like(x)
    before = UNCOMPUTED["tests.cuda.emulator.a_kernel.shifted_softmax"]
    shifted_softmax[(2000,)](x, out, 8, 1.5, BLOCK=8)
    assert not out.any()
    assert UNCOMPUTED["tests.cuda.emulator.a_kernel.shifted_softmax"] == before + 1
    assert "a_kernel.shifted_softmax (1)" in uncomputed_notes()[0]


def test_a_kernel_is_computed_once_where_a_parent_and_the_process_entered() -> None:
    """As in a worker of pytest-xdist: what works in place would be off by a second pass."""
    program = (
        "from memprof.emulate.launch import enter; enter('H100')\n"
        "import torch\n"
        "from memprof.emulate.notes import UNCOMPUTED\n"
        "from tests.cuda.emulator.a_kernel import shifted_softmax\n"
        "x = torch.zeros(2000, 8, device='cuda')\n"
        "shifted_softmax[(2000,)](x, x, 8, 1.5, BLOCK=8)\n"
        "print(list(UNCOMPUTED.values()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment("24GB"), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == ["[1]"], done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trl_s_log_probabilities_are_those_of_its_cpu_path(dtype: Any) -> None:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    torch.manual_seed(0)
    hidden, weight = torch.randn(21, 16, dtype=dtype), torch.randn(300, 16, dtype=dtype)
    targets = torch.randint(0, 300, (21,))
    answers = []
    for device in ("cpu", "cuda"):
        h, w = (t.clone().to(device).requires_grad_() for t in (hidden, weight))
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            h, w, None, targets.to(device), 0.9, 128, None, 1.0, ("entropy",)
        )
        (logprobs.sum() + entropy.square().sum()).backward()
        answers.append([t.detach().cpu() for t in (logprobs, entropy, h.grad, w.grad)])
    for cpu, cuda in zip(*answers, strict=True):
        torch.testing.assert_close(cuda, cpu)


@pytest.mark.parametrize("entropies", [True, False])
def test_memprof_s_kernels_give_the_tiles_values(entropies: bool) -> None:
    from memprof.grpo.loss import fused_kernels, fused_tiles

    torch.manual_seed(0)
    tile, targets = torch.randn(9, 130), torch.randint(0, 130, (9,))
    transform = fused_tiles.Transform(softcap=30.0, inverse_temperature=1.25)
    expected = fused_tiles.tile_stats(tile, targets, transform, entropies)
    found = fused_kernels.triton_stats(tile.cuda(), targets.cuda(), transform, entropies)
    weights = torch.randn(9)
    second = weights.flip(0) if entropies else None
    on_card = tile.cuda()
    fused_tiles.tile_gradient(tile, targets, expected[1], expected[2], weights, second, transform)
    cuda = [None if t is None else t.cuda() for t in (targets, found[1], found[2], weights, second)]
    fused_kernels.triton_gradient(on_card, *cuda, transform)
    for ours, theirs in zip((*found, on_card), (*expected, tile), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), theirs)


def train(folder: Path, callbacks: list[Any], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    trainer = runs.grpo(runs.checkpoint(folder), folder / "out", callbacks, use_cpu=False, **settings)
    trainer.train()
    wanted = ("loss", "grad_norm", "reward", "reward_std", "kl", "entropy", "completions/mean_length")
    rows = [{k: row[k] for k in wanted if k in row} for row in trainer.state.log_history if "loss" in row]
    return rows, {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "settings", [{}, {"lora": True, "gradient_checkpointing": True, "bf16": True}], ids=["full", "lora"]
)
def test_the_callback_changes_no_bit_of_a_run(settings: dict[str, Any], tmp_path: Path) -> None:
    callback = MemProfCallback(output_dir=tmp_path / "memprof", table=False)
    bare, bare_parameters = train(tmp_path, [], **settings)
    watched, parameters = train(tmp_path, [callback], **settings)
    assert watched == bare
    assert all(row["reward_std"] > 0 and row["grad_norm"] > 0 for row in bare)
    assert all(torch.equal(parameters[name], value) for name, value in bare_parameters.items())
    assert callback.result.snapshots
