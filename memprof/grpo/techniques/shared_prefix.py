"""Hold a prompt's keys, values and last hidden state for the completions that continue it."""

from __future__ import annotations

import torch

__all__ = ["SharedPrefix"]


class SharedPrefix:
    """A prompt's keys and values by layer, and its last hidden state: for the graph behind, and as leaves ahead.

    ``fp32_gradients``: sums over completions are kept in fp32, whatever the keys' dtype.
    """

    def __init__(self, length: int, *, fp32_gradients: bool = True) -> None:
        self.length = length
        self.fp32_gradients = fp32_gradients
        self._layers: dict[int, tuple[_Shared, _Shared]] = {}
        self._last: _Shared | None = None
        self._used = False

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's key and value ``[1, heads, P, width]``; ignored when a checkpointed layer is recomputed."""
        if self._last is None and not self._used:
            self._layers[layer] = (_Shared(key, self.fp32_gradients), _Shared(value, self.fp32_gradients))

    def keep_last(self, hidden: torch.Tensor) -> None:
        """Keep the last token's hidden state ``[1, H]``: the prompt is complete."""
        self._last = _Shared(hidden, self.fp32_gradients)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the leaves of one layer's keys and values."""
        key, value = self._layers[layer]
        return key.leaf, value.leaf

    @property
    def last_hidden(self) -> torch.Tensor:
        """Return the leaf ``[1, H]`` that predicts every completion's first token."""
        assert self._last is not None
        return self._last.leaf

    def backward(self) -> None:
        """Run the prompt's backward with what the completions' have left, once; nothing where nothing was left."""
        shared = [part for pair in self._layers.values() for part in pair]
        shared += [self._last] if self._last is not None else []
        roots = [(part.graph, grad) for part in shared if (grad := part.gradient()) is not None]
        self._layers, self._last, self._used = {}, None, True
        if roots:
            torch.autograd.backward([graph for graph, _ in roots], [grad for _, grad in roots])


class _Shared:
    """A tensor of the prompt's graph and the leaf that stands for it."""

    def __init__(self, graph: torch.Tensor, fp32: bool) -> None:
        self.graph = graph
        self.leaf = graph.detach().requires_grad_(graph.requires_grad)
        self._sum: _Sum | None = None
        if graph.requires_grad and fp32 and graph.dtype != torch.float32:
            self._sum = _Sum()
            self.leaf.register_post_accumulate_grad_hook(self._sum.add)  # type: ignore[no-untyped-call]

    def gradient(self) -> torch.Tensor | None:
        if self._sum is None:
            return self.leaf.grad
        return None if self._sum.value is None else self._sum.value.to(self.graph.dtype)


class _Sum:
    """Add up a leaf's gradients in fp32.

    Must not refer to the leaf: the collector does not see hooks of this kind, so leaf, graph and the parameters behind
    it would never be freed.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None

    def add(self, leaf: torch.Tensor) -> None:
        """Take a gradient off the leaf, in the backward that has just left it there."""
        assert leaf.grad is not None
        if self.value is None:
            self.value = leaf.grad.float()
        else:
            self.value += leaf.grad
        leaf.grad = None
