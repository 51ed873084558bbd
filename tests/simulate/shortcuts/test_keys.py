"""The fake mode's cache answers the same under cheaper keys, and is hit as often."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from memprof.compat import patching  # noqa: E402
from memprof.simulate.shortcuts.keys import quick_keys  # noqa: E402


def _facts(tensor: Any) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.requires_grad,
        tensor.untyped_storage().nbytes(), tensor._is_view(),
    )  # fmt: skip


def _operations() -> tuple[list[Any], int]:
    """What operations that differ in one thing only make, each twice so that the second is remembered."""
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        whole, wide = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 6)
        grad = torch.zeros(4, 6, requires_grad=True)
        made = []
        for _ in range(2):
            made += [whole * 2, whole * 2.0, whole * True, whole + torch.zeros((), dtype=torch.float64)]
            made += [wide + 1, wide.t() + 1, wide[:, 1:] + 1, wide[1:3].contiguous(), wide[:, 1:].contiguous()]
            made += [wide.sum(0), wide.sum(1), wide.sum((0, 1)), wide.sum(0, keepdim=True), wide.view(6, 4), wide.t()]
            made += [torch.cat([wide, wide]), torch.cat([wide, wide], 1), torch.stack([wide, wide, wide])]
            made += [wide.to(torch.bfloat16), wide.double(), grad * wide, grad.detach() * 2, torch.mm(wide, grad.t())]
            made += [wide.expand(2, 4, 6) + 1, wide[:, :0] + 1, *wide.split(2), wide.clone().add_(1)]
    return [_facts(tensor) for tensor in made], FakeTensorMode.cache_info().hits


def test_the_same_is_found() -> None:
    plain, hits = _operations()
    changes = quick_keys()
    assert [target.name for target, _ in changes] == ["_prep_args_for_hash"]  # this torch's is known
    with patching(*changes):
        quick, quick_hits = _operations()
    assert quick == plain
    assert quick_hits == hits > len(plain) / 3
    half = len(plain) // 2
    assert plain[:half] == plain[half:]


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTensorMode, "_prep_args_for_hash", lambda self, result, args: None)
    assert quick_keys() == []
