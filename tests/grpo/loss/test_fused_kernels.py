"""The Triton kernels, interpreted on the CPU, against the torch passes and the full logits.

Triton decides at import whether it interprets, so the comparison runs in an interpreter of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: its kernels do not run")


@needs_triton
def test_interpreted_kernels_agree_with_torch() -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1")
    ran = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "48 tiles and 8 losses agree"


@needs_triton
def test_kernels_compile_for_gpus() -> None:
    """To machine code, which needs no GPU: Ampere and Hopper, every branch of the kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, __file__, "compile"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "8 kernels compiled"


def compile_kernels() -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from memprof.grpo.loss import fused_kernels as kernels

    fixed = {"tile_ptr": "*bf16", "targets_ptr": "*i64", "row_stride": "i32", "vocabulary": "i32"}
    count = 0
    for capability, branch in product((80, 90), (False, True)):
        for kernel, block in ((kernels._stats_kernel, 8192), (kernels._gradient_kernel, 2048)):
            constants = {n: block if n == "BLOCK" else branch for n in kernel.arg_names if n.isupper()}
            if "HAS_DLOGPS" in constants:
                constants["HAS_DLOGPS"] = True
            rest = {
                n: "constexpr" if n in constants else "*fp32" if n.endswith("_ptr") else "fp32"
                for n in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature={**rest, **fixed}, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert compiled.asm["cubin"]
            count += 1
    return count


def compare_tiles() -> int:
    """Kernels against torch passes: dtypes, caps, temperatures, which gradients there are, sizes off the block's."""
    from memprof.grpo.loss import fused_kernels as kernels
    from memprof.grpo.loss.fused_tiles import Transform, tile_gradient, tile_stats

    kernels._STATS_BLOCK, kernels._GRADIENT_BLOCK = 64, 32
    transforms = [Transform(), Transform(0.5, None, 1 / 0.7), Transform(1.0, 30.0, 1.0), Transform(2.0, 5.0, 1 / 0.9)]
    cases = list(
        product([torch.float32, torch.bfloat16], transforms, [(True, False), (False, True), (True, True)], [301, 64])
    )
    g = torch.Generator().manual_seed(0)
    for dtype, transform, (for_logps, for_entropies), vocabulary in cases:
        tile = (torch.randn(5, vocabulary, generator=g) * 4).to(dtype)
        tile[2] += 300.0  # large logits: exp must not overflow
        targets = torch.randint(vocabulary, (5,), generator=g)
        found = kernels.triton_stats(tile, targets, transform, for_entropies)
        meant = tile_stats(tile, targets, transform, for_entropies)
        for a, b in zip(found, meant, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5)
        dlogps = torch.randn(5, generator=g) if for_logps else None
        dentropies = torch.randn(5, generator=g) if for_entropies else None
        mine, plain = tile.clone(), tile.clone()
        kernels.triton_gradient(mine, targets, meant[1], meant[2], dlogps, dentropies, transform)
        tile_gradient(plain, targets, meant[1], meant[2], dlogps, dentropies, transform)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # a cap's tanh is a sigmoid here
        torch.testing.assert_close(mine, plain, rtol=tolerance, atol=tolerance)
    return len(cases)


def compare_losses() -> int:
    """The whole function over Triton's passes against itself over torch's."""
    from memprof.grpo.loss import chunked_loss
    from memprof.grpo.loss import fused_kernels as kernels
    from memprof.grpo.loss.fused_tiles import accumulate
    from memprof.grpo.loss.passes import Passes, passes_for

    with_triton = Passes("triton", kernels.triton_stats, kernels.triton_gradient, False, accumulate)
    cases = list(product([None, 4.0], [False, True], [False, True]))
    for softcap, bias, in_forward in cases:
        results = []
        for passes in (with_triton, passes_for(torch.device("cpu"))):
            chunked_loss.passes_for = lambda _, chosen=passes: chosen  # type: ignore[misc]
            results.append(_gradients(chunked_loss, softcap, bias, in_forward))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return len(cases)


def _gradients(chunked_loss: Any, softcap: float | None, with_bias: bool, in_forward: bool) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 8, generator=g, requires_grad=True)
    weight = torch.randn(97, 8, generator=g, requires_grad=True)
    bias = torch.randn(97, generator=g, requires_grad=True) if with_bias else None
    a, b = torch.randn(11, generator=g), torch.randn(11, generator=g)
    known = (lambda logps, entropies, start, stop: (a[start:stop], b[start:stop])) if in_forward else None
    found = chunked_loss.fused_linear_logprobs(
        hidden, weight, bias, torch.randint(97, (11,), generator=g),
        temperature=0.8, want_entropy=True, softcap=softcap, chunk_tokens=4, grad_fn=known,
    )  # fmt: skip
    (found.anchor if in_forward else found.logps @ a + found.entropies @ b).backward()
    leaves = [hidden, weight] + ([bias] if bias is not None else [])
    return [found.logps.detach(), found.entropies.detach(), *(leaf.grad for leaf in leaves)]


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        print(f"{compile_kernels()} kernels compiled")
        sys.exit()
    print(f"{compare_tiles()} tiles and {compare_losses()} losses agree")
