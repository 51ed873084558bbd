"""Sequences packed into one row against the same sequences alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memprof.errors import UsageError  # noqa: E402
from memprof.grpo.techniques.packing import packed_forward  # noqa: E402
from tests.grpo.tiny_models import FAMILIES, assert_same, body_of, build, gradients, tokens, weighted  # noqa: E402

SEQUENCES = [tokens(n, seed=n) for n in (7, 1, 12)]


def alone(model: Any) -> tuple[list[Any], dict[str, Any]]:
    hiddens = []
    for i, ids in enumerate(SEQUENCES):
        hiddens.append(body_of(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0])
        weighted(hiddens[-1], i).backward()
    return hiddens, gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_are_those_of_the_sequences_alone(family: str) -> None:
    model = build(family)
    meant, true = alone(model)
    found = packed_forward(body_of(model), SEQUENCES)
    torch.autograd.backward([weighted(h, i) for i, h in enumerate(found)])
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_same(gradients(model), true, 1e-5)


def test_no_mask_over_all_tokens_exists() -> None:
    """No tensor of the row's length squared, and none for the segments either."""
    model = build()
    long = [tokens(40, seed=1), tokens(50, seed=2)]
    with _Squares() as seen:
        packed_forward(body_of(model), long)
    assert seen.elements < 90 * 90


class _Squares(torch.utils._python_dispatch.TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_a_model_that_keeps_its_arguments_to_itself_is_refused() -> None:
    """Without the segments its attention would mix the sequences up."""
    body = body_of(build())

    def deaf(memprof_segments: Any, **kwargs: Any) -> Any:
        return body(**kwargs)

    with pytest.raises(UsageError, match="does not hand keyword arguments"):
        packed_forward(deaf, SEQUENCES)
