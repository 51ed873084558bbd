"""Count what a simulated step computes and moves: FLOPs, bytes and kernels, phase by phase.

FLOPs are those of matrix products, convolutions and attention, by the formulas of ``torch.utils.flop_counter``. Bytes
are those of every tensor that a kernel reads or writes; a view moves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memprof.compat import torch as torch_names
from memprof.foreign import Args, Kwargs
from memprof.vocabulary import Phase

_HALF = (torch.bfloat16, torch.float16)
_UNSEEN: Any = object()
_IN_PIECES = {Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OLD_LOGPROBS.value, Phase.REFERENCE_LOGPROBS.value}

# FLOPs of half and of single precision, and bytes.
_Kernel = tuple[int, int, int]


@dataclass
class Tally:
    """Hold one phase's sums.

    ``kernels`` has FLOPs of half and of single precision and bytes -> how many did that, each launched by the host;
    ``fused`` the same of those that one launch runs together (CUDA graphs).
    """

    kernels: dict[tuple[int, int, int], float] = field(default_factory=dict)
    fused: dict[tuple[int, int, int], float] = field(default_factory=dict)
    host_bytes: float = 0.0

    def add(self, key: tuple[int, int, int], times: float) -> None:
        """Count kernels that compute and move the same."""
        self.kernels[key] = self.kernels.get(key, 0.0) + times

    def add_all(self, other: Tally, times: float) -> None:
        for key, count in other.kernels.items():
            self.add(key, count * times)
        for key, count in other.fused.items():
            self.fused[key] = self.fused.get(key, 0.0) + count * times
        self.host_bytes += other.host_bytes * times

    def copy(self) -> Tally:
        return Tally(dict(self.kernels), dict(self.fused), self.host_bytes)

    def since(self, before: Tally | None) -> Tally:
        """Return these sums less an earlier copy of them."""
        more = self.copy()
        if before is not None:
            more.add_all(before, -1.0)
        return more


class PhaseWork:
    """Count the work of the phases of each step.

    ``pieces`` multiplies what the phases that train and score in pieces do, where the simulation runs few of many that
    are alike. Nothing is counted unless ``wanted``: a card without a known speed has no use for it. ``now`` tells the
    phase and the step.
    """

    def __init__(self, now: Callable[[], tuple[str, int | None]]) -> None:
        self._now = now
        self.wanted = False
        self.phases: dict[tuple[int | None, str], Tally] = {}
        self.pieces = 1.0
        self.also: list[Tally] = []  # count everything too
        self._parts: list[Tally] | None = None
        self._kernels: dict[int, _Kernel | None] = {}
        self._facts: dict[Any, tuple[bool, Callable[..., int] | None]] = {}

    def see(self, func: Any, args: Args, kwargs: Kwargs, out: Any, alike: int | None = None) -> None:
        """Count one operation; views and what makes no kernel count nothing.

        Calls with the same number ``alike`` do the same work.
        """
        if not self.wanted:
            return
        kernel = self._kernels.get(alike, _UNSEEN) if alike is not None else _UNSEEN
        if kernel is _UNSEEN:
            kernel = self._kernel(func, args, kwargs, out)
            if alike is not None:
                self._kernels[alike] = kernel
        if kernel is None:
            return
        here, times = self._here()
        here.add(kernel, times)
        for tally in self.also:
            tally.add(kernel, 1.0)

    def _kernel(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> _Kernel | None:
        """Return what an operation's kernel computes and moves; None where there is no kernel."""
        nothing, formula = self._facts.get(func) or self._look(func)
        if nothing:
            return None
        flops = 0
        read, wrote = _tensors((args, *kwargs.values())), _tensors((out,))
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=out))
        elif not read and not wrote:
            return None
        half = any(t.dtype in _HALF for t in read)  # a float32 sum of halves' products too
        if func in _TOUCHES_ROWS:  # of the table, what is taken from it, or put into it
            read, wrote = read[1:], read[1:] if func is _ATEN.index_copy_.default else [*wrote[:1], *wrote[:1]]
        moved = sum(t.numel() * t.element_size() for t in (*read, *wrote))
        return (flops, 0, moved) if half else (0, flops, moved)

    def to_host(self, nbytes: int) -> None:
        here, times = self._here()
        here.host_bytes += nbytes * times
        for tally in self.also:
            tally.host_bytes += nbytes

    @contextlib.contextmanager
    def apart(self) -> Iterator[list[Tally]]:
        """Count work done while open in tallies of its own, one a part (:meth:`next_part`), and in no phase."""
        parts, outer = [Tally()], self._parts
        self._parts = parts
        try:
            yield parts
        finally:
            self._parts = outer

    def next_part(self) -> None:
        """Begin another part of what is counted apart; elsewhere nothing."""
        if self._parts is not None:
            self._parts.append(Tally())

    def add(self, tally: Tally, times: float) -> None:
        """Count a separate or repeated tally ``times`` times."""
        here, pieces = self._here()
        here.add_all(tally, times * pieces)
        for told in self.also:
            told.add_all(tally, times)

    def add_counted(self, tallies: dict[str, Tally]) -> None:
        """Count once more what was counted in these phases."""
        for phase, tally in tallies.items():
            self._in(phase).add_all(tally, 1.0)

    def last_step(self) -> int | None:
        """Return the last step whose work was counted; None where there are no steps."""
        return max((step for step, _ in self.phases if step is not None), default=None)

    def of_step(self, step: int | None) -> dict[str, Tally]:
        return {phase: tally for (at, phase), tally in self.phases.items() if at == step}

    def _here(self) -> tuple[Tally, float]:
        """Return what counts now, and how many times."""
        phase, _ = self._now()
        return self._in(phase), self.pieces if phase in _IN_PIECES else 1.0

    def _in(self, phase: str) -> Tally:
        return self._parts[-1] if self._parts is not None else self.phases.setdefault((self._now()[1], phase), Tally())

    def _look(self, func: Any) -> tuple[bool, Callable[..., int] | None]:
        packet = getattr(func, "overloadpacket", None)
        if packet is not None and packet.__name__.endswith("_"):  # addmm_ computes what addmm does
            packet = getattr(_ATEN, packet.__name__[:-1], packet)
        formula = flop_registry.get(packet)
        nothing = bool(getattr(func, "is_view", False)) or func in _NO_KERNEL
        self._facts[func] = (nothing, formula)
        return nothing, formula


_ATEN = torch.ops.aten
_TOUCHES_ROWS = {_ATEN.index_copy_.default, _ATEN.index_select.default, _ATEN.index_select.out}
_NO_KERNEL = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
    torch_names.UNSAFE_VIEW.get(),
    torch_names.LOCAL_SCALAR.get(),
}


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
