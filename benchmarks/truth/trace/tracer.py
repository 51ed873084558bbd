"""Record every storage's birth and death in a real run, with its stack and what it is.

Independent of ``memprof.record`` on purpose: what memprof is measured against must not share its code.
A :class:`Tracer` is a dispatch mode. While ``active`` it records one :class:`Storage` for each storage an
operator makes and two events for its life. Identity (parameter, gradient, optimizer state, cache, input of a
checkpoint) is *marked* by the harness, which holds the real objects; nothing here guesses.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# One event: (kind, storage, stack, phase); kind is "a" (born), "f" (died) or "m" (mark: storage indexes ``marks``).
Event = tuple[str, int, int, str]

# Operators whose result is "cast from" or "added to" their first operands.
_KINSHIP = ("aten._to_copy", "aten.add", "aten.clone", "aten.copy_", "aten.mul", "aten.div", "aten.sum")
_MATMULS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


@dataclass
class Storage:
    """One storage: what was seen at its birth, and what it turned out to be."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    tiny_bytes: int
    stack: int
    phase: str
    op: str
    grad_enabled: bool
    parents: tuple[int, ...] = ()
    mark: tuple[str, str] | None = None
    boundary: bool = False
    fixed_bytes: int | None = None
    feeds: set[int] = field(default_factory=set)
    node: str = ""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages while ``active``; a pushed but inactive tracer only passes operators through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = False
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.marks: list[str] = []
        self.stacks: list[tuple[tuple[CodeType, int], ...]] = []
        self.warmups: list[tuple[int, int]] = []
        self.first_matmul: dict[str, tuple[int, int, str]] = {}
        self._stack_ids: dict[tuple[tuple[CodeType, int], ...], int] = {}
        self._live: dict[int, int] = {}
        self._phases: list[str] = ["load"]
        self._lock = threading.RLock()
        self._grads: set[int] = set()
        self.in_backward = 0

    # -- phases and switches -------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self._phases[-1]

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Put everything inside into ``phase`` (the innermost wins)."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()

    def set_base_phase(self, phase: str) -> None:
        self._phases[0] = phase

    @contextmanager
    def switched(self, active: bool) -> Iterator[None]:
        """Record (or do not) for a while: what a GPU would not see, or would do inside one kernel."""
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    def note(self, name: str) -> None:
        """Name an instant in the stream of events."""
        with self._lock:
            self.marks.append(name)
            self.events.append(("m", len(self.marks) - 1, 0, self.phase))

    # -- births and deaths ---------------------------------------------------------------------

    def capture(self, depth: int = 2) -> int:
        """Intern the calling Python stack, innermost first."""
        frame: FrameType | None = sys._getframe(depth)
        out: list[tuple[CodeType, int]] = []
        while frame is not None:
            out.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(out)
        number = self._stack_ids.get(key)
        if number is None:
            number = self._stack_ids[key] = len(self.stacks)
            self.stacks.append(key)
        return number

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the recorded storage behind a tensor."""
        try:
            return self._live.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def adopt(self, tensor: torch.Tensor, op: str, depth: int = 3, parents: tuple[int, ...] = ()) -> int | None:
        """Record ``tensor``'s storage as born here, unless it is known, empty or on the meta device."""
        if tensor.is_meta:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = storage._cdata
        with self._lock:
            if key in self._live:
                return self._live[key]
            if storage.nbytes() == 0:
                return None
            number = len(self.storages)
            stack = self.capture(depth)
            self.storages.append(
                Storage(number, self._extent(tensor, storage.nbytes()), tensor.dtype, storage.nbytes(), stack,
                        self.phase, op, torch.is_grad_enabled(), parents)
            )
            if self.in_backward:
                running = torch._C._current_autograd_node()
                self.storages[number].node = running.name().rsplit("::", 1)[-1] if running is not None else ""
            self._live[key] = number
            self.events.append(("a", number, stack, self.phase))
        weakref.finalize(storage, self._died, key, number).atexit = False
        return number

    @staticmethod
    def _extent(tensor: torch.Tensor, nbytes: int) -> tuple[int, ...]:
        """Return the shape the storage was made for: of the tensor if it fills it, else flat."""
        shape = tuple(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step != 0 or n == 1)
        count = 1
        for n in shape:
            count *= n
        return shape if count * tensor.element_size() == nbytes else (nbytes // tensor.element_size(),)

    def _died(self, key: int, number: int) -> None:
        with self._lock:
            if self._live.get(key) == number:
                del self._live[key]
            self._grads.discard(number)
            self.events.append(("f", number, self.capture(2), self.phase))

    # -- identity ------------------------------------------------------------------------------

    def mark(self, tensor: torch.Tensor | None, category: str, detail: str, force: bool = False) -> None:
        """Mark ``tensor``'s storage as ``category`` for its whole life (the first mark holds unless forced)."""
        number = None if tensor is None else self.number_of(tensor)
        if number is not None and (force or self.storages[number].mark is None):
            self.storages[number].mark = (category, detail)

    def mark_module(self, module: torch.nn.Module, category: str, adapters: bool = False) -> None:
        """Mark parameters and buffers of a model, by owner; LoRA tensors are ``adapters``."""
        for name, p in module.named_parameters(remove_duplicate=False):
            is_adapter = adapters and ("lora_" in name or "modules_to_save" in name)
            self.mark(p, "adapters" if is_adapter else category, name)
        for name, b in module.named_buffers(remove_duplicate=False):
            self.mark(b, category, "buffer:" + name)

    def mark_gradients(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._grads.clear()
        for name, p in parameters:
            if p.grad is not None:
                self.mark(p.grad, "gradients", name)
                number = self.number_of(p.grad)
                if number is not None:
                    self._grads.add(number)

    def mark_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    self.mark(value, "optimizer_state", name)

    def mark_boundary(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                number = self.number_of(value)
                if number is not None:
                    self.storages[number].boundary = True

    # -- the dispatch mode ---------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        name = str(func._schema.name).replace("::", ".")
        if self.in_backward and name == "aten.add" and self._accumulates(args):
            # With a dispatch mode on, autograd accumulates out of place; without one it adds in place.
            self._kin(self.number_of(args[0]), args[1])
            return args[0].add_(args[1])
        if self.phase != "load" and name in _MATMULS:
            self._saw_matmul()
        out = func(*args, **kwargs)
        parents: tuple[int, ...] = ()
        if name.startswith(_KINSHIP):
            found = (self.number_of(a) for a in args[:2] if isinstance(a, torch.Tensor))
            parents = tuple(n for n in found if n is not None)
            if name == "aten.copy_" and len(parents) == 2:
                self.storages[parents[0]].feeds.add(parents[1])
        self._adopt_all(out, name, parents)
        return out

    def _accumulates(self, args: tuple[Any, ...]) -> bool:
        """Tell whether this is the engine's own sum of two gradients of one tensor, into the first of them.

        The engine calls it with no Python frame between, and adds in place where nobody else holds the first
        (of the tensor: the buffer, this wrapper and the dispatcher's two; of its storage: the tensor and us).
        """
        first, second = args[0], args[1]
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or torch.is_grad_enabled():
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        if self.number_of(first) in self._grads:
            return True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(("eval_frame.py", "_compile.py")):
            frame = frame.f_back
        holders: int = first._use_count()  # type: ignore[attr-defined]
        alone = holders <= 4 and torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= 2
        return frame is not None and frame.f_code.co_name == "_engine_run_backward" and alone

    def _kin(self, child: int | None, parent: torch.Tensor) -> None:
        number = self.number_of(parent)
        if child is not None and number is not None:
            self.storages[child].feeds.add(number)

    def _adopt_all(self, out: Any, name: str, parents: tuple[int, ...]) -> None:
        if isinstance(out, torch.Tensor):
            self.adopt(out, name, 4, parents)
        elif isinstance(out, (tuple, list)):
            for item in out:
                self._adopt_all(item, name, parents)

    def _saw_matmul(self) -> None:
        thread = "backward" if self.in_backward else "forward"
        if thread not in self.first_matmul:
            # A cuBLAS handle and its workspace are made at a thread's first product.
            self.first_matmul[thread] = (len(self.events), self.capture(3), self.phase)

    def wrap_phase(self, fn: Callable[..., Any], phase: str, after: Callable[..., None] | None = None) -> Any:
        """Wrap ``fn`` with everything inside in ``phase``; ``after(result, *args)`` runs at its end."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.within(phase):
                result = fn(*args, **kwargs)
            if after is not None:
                after(result, *args)
            return result

        wrapped.__wrapped__ = fn  # type: ignore[attr-defined]
        return wrapped
