"""Hold a prompt's keys, values and last hidden state for the completions that continue it."""

from __future__ import annotations

import torch


class SharedPrefix:
    """A prompt's keys and values by layer, and its last hidden state: for the graph behind, and as leaves ahead. With
    ``fp32_gradients``, sums over completions are kept in fp32, whatever the keys' dtype."""

    def __init__(self, length: int, *, fp32_gradients: bool = True) -> None:
        self.length = length
        self.fp32_gradients = fp32_gradients
        self._layers: dict[int, tuple[_Shared, _Shared]] = {}
        self._last: _Shared | None = None
        #: What the completions have left, once the prompt's backward has begun.
        self._left: list[torch.Tensor | None] | None = None

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's key and value ``[1, heads, P, width]``; ignored when a checkpointed layer is recomputed."""
        if self._last is None and self._left is None:
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

    @property
    def ran_out(self) -> bool:
        """Tell whether the prompt's backward has begun: its graph is gone, what the completions have left is not."""
        return self._left is not None

    def gradients(self) -> dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return what completions have left on each leaf that takes gradients: its own, and the sum in fp32."""
        return {part.leaf: part.left for part in self._parts() if part.graph.requires_grad}

    def backward(self, earlier: SharedPrefix | None = None) -> None:
        """Run the prompt's backward with what the completions' have left; nothing where nothing was left.

        ``earlier``: the same prompt, whose backward has run out of memory; this one has its completions' gradients.
        """
        parts = self._parts()
        self._left = [part.gradient() for part in parts] if earlier is None else earlier._left
        assert self._left is not None
        pairs = zip(parts, self._left, strict=True)
        roots = [(part.graph, grad) for part, grad in pairs if grad is not None and part.graph.requires_grad]
        self._layers, self._last = {}, None
        del parts
        if roots:
            torch.autograd.backward([graph for graph, _ in roots], [grad for _, grad in roots])
        self._left = []

    def _parts(self) -> list[_Shared]:
        pairs = [part for pair in self._layers.values() for part in pair]
        return pairs + ([self._last] if self._last is not None else [])


class _Shared:
    """A tensor of the prompt's graph and the leaf that stands for it."""

    def __init__(self, graph: torch.Tensor, fp32: bool) -> None:
        self.graph = graph
        self.leaf = graph.detach().requires_grad_(graph.requires_grad)
        self._sum: _Sum | None = None
        if graph.requires_grad and fp32 and graph.dtype != torch.float32:
            self._sum = _Sum()
            self.leaf.register_post_accumulate_grad_hook(self._sum.add)  # type: ignore[no-untyped-call]

    @property
    def left(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.leaf.grad, None if self._sum is None else self._sum.value

    def gradient(self) -> torch.Tensor | None:
        grad, total = self.left
        if total is None:
            return grad
        # Memory may have run out before the last was added.
        return (total if grad is None else total + grad).to(self.graph.dtype)


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
