"""Watch every operation by a dispatch mode, and remove the mode from torch's stack wherever it then is."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch

from memprof.compat import torch as torch_names
from memprof.recording.guard import FailureGuard, mark_user_error

PLAIN: Any = torch_names.PLAIN_DISPATCH.get()
STRIDED = torch.strided
_NO_OVERRIDES: Any = torch_names.NO_FUNCTIONS.get()
#: Torch's own layout, shape, dtype and storage of a tensor, whatever a subclass has in their place; for use while an
#: operation is shown, when no ``__torch_function__`` is called.
_TENSOR: Any = torch.Tensor
layout_of: Callable[[torch.Tensor], Any] = _TENSOR.layout.__get__
shape_of: Callable[[torch.Tensor], torch.Size] = _TENSOR.shape.__get__
dtype_of: Callable[[torch.Tensor], torch.dtype] = _TENSOR.dtype.__get__
storage_in_operation: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
# What an operation's tensors are, by their types.
_ORDINARY, _WRAPPER, _NO_MEMORY = range(3)

_DispatchMode: Any = torch_names.DISPATCH_MODE.get()


class _Recording(NamedTuple):
    """Hold what a mode calls of the trace that it shows operations to."""

    trace: Any
    kind_of: Callable[[tuple[type, ...]], int]
    failed: Callable[[BaseException], None]


class Watching(_DispatchMode):  # type: ignore[misc]
    """Run every operation as it is, and show it to the tensor trace."""

    supports_higher_order_operators = True

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self._recording: _Recording | None = _Recording(
            trace, trace.guard.hook(self._kind), trace.guard.hook(trace.failed)
        )
        self._kinds: dict[tuple[type, ...], int] = {}
        self._thread = threading.get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the mode is on the stack of another thread than this one."""
        return self._thread != threading.get_ident()

    def leave_later(self) -> None:
        """Forget the recording, and leave the stack of the mode's own thread after its next operation: a thread cannot
        reach the stack of another one."""
        self._recording = None

    def _leave_after_this(self) -> None:
        # The mode is not on the stack while it runs. A profile function is called once the operation has returned.
        if sys.getprofile() is None:
            sys.setprofile(FailureGuard().hook(self._leave))

    def _leave(self, _frame: Any, _event: str, _argument: Any) -> None:
        modes = torch_names.MODE_STACK.get()()
        if any(mode is self for mode in modes):
            previous = None  # as it was: another profiler is left alone
            sys.setprofile(previous)
            for mode in modes:  # those of other recordings, too, which had no profile function to set
                if isinstance(mode, Watching) and mode._recording is None:
                    remove_mode(mode)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled; its allocations are seen where they come out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper would triple this mode's cost; see keep_compiler_off

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recording = self._recording  # once: the recording may end meanwhile, on another thread
        if recording is None:
            self._leave_after_this()
            return func(*args, **kwargs)
        trace, kind_of, failed = recording
        if types:
            kind = kind_of(tuple(types))
            if kind == _WRAPPER:
                return NotImplemented  # it unpacks itself first; its inner tensors come by here again
            if kind == _NO_MEMORY:
                return func(*args, **kwargs)
        # Calling an operator from Python calls the `__torch_function__` of its arguments, which autograd does not.
        # Others' operators may be written in Python and rely on it.
        with _NO_OVERRIDES() if getattr(func, "namespace", "") == "aten" else contextlib.nullcontext():
            try:
                out = func(*args, **kwargs)
            except RuntimeError as error:
                failed(error)
                raise
        if trace.guard.failure is None and trace.is_watching:
            try:
                with _NO_OVERRIDES():
                    if requested := trace.too_much(out):
                        # The operation has run; dropping its result leaves things as if it had not.
                        out = None
                        raise mark_user_error(trace.refusal(requested))
                    trace.see(func, args, kwargs, out)
            except Exception as error:
                trace.guard.shut(error)  # a hook's guard without its frame: this runs at every operation
        return out

    def _kind(self, kinds: tuple[type, ...]) -> int:
        answer = self._kinds.get(kinds)
        if answer is None:
            special = [k for k in kinds if getattr(k, "__torch_dispatch__", PLAIN) is not PLAIN]
            # torch's own fake and functional tensors: no memory behind them, and they must not be turned away.
            fake = any(k.__module__.startswith("torch._subclasses") for k in special)
            answer = _NO_MEMORY if fake else _WRAPPER if special else _ORDINARY
            self._kinds[kinds] = answer
        return answer


def keep_compiler_off(code: CodeType) -> None:
    """Keep torch's compiler out of a function and of what it calls (free when the compiler is off)."""
    targets = (torch_names.SKIP_COMPILER, torch_names.FRAME_ACTION, torch_names.FRAME_STRATEGY)
    skip, action, strategy = (target.find() for target in targets)
    if skip and skip is action:  # torch before 2.7 has one function in their stead
        skip(code)
    elif skip and hasattr(action, "SKIP") and strategy:
        skip(code, strategy(action.SKIP, action.SKIP))


keep_compiler_off(Watching.__torch_dispatch__.__code__)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return tensors with a storage among ``values`` and one or two levels of lists in them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if layout_of(value) is STRIDED:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def remove_mode(mode: Any) -> str | None:
    """Take ``mode`` off the stack; return what was out of order, for a warning, or None.

    Modes a user put on top of it are lifted and put back: a mode's own ``__exit__`` pops whatever is on top.
    """
    pop, push = torch_names.POP_MODE.get(), torch_names.PUSH_MODE.get()
    if not any(m is mode for m in torch_names.MODE_STACK.get()()):
        return "memprof's dispatch mode had already been taken off the stack by somebody else's exit"
    lifted = []
    while (top := pop()) is not mode:
        lifted.append(top)
    push(mode)
    mode.__exit__(None, None, None)
    for other in reversed(lifted):
        push(other)
    if foreign := [other for other in lifted if not isinstance(other, Watching)]:  # recordings may end in any order
        names = ", ".join(type(m).__name__ for m in foreign)
        return f"{names} was entered during memprof's recording and outlives it; it was kept in place"
    return None
