"""Show every operation under torch's fake mode to the recorder, and answer what no fake tensor can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.foreign import Args, Kwargs
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcut_switches import shortcut

_DEVICE = torch.ops.prim.device.default
_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_PLAIN: Any = torch_names.PLAIN_DISPATCH.get()
# torch would wrap the mode's dispatch to keep its compiler out, which costs more than the dispatch itself.
_Mode: Any = type(
    "_Mode", (torch_names.DISPATCH_MODE.get(),), {torch_names.SKIP_DYNAMO.name: classmethod(lambda cls: False)}
)


class OperationTracking(_Mode):  # type: ignore[misc]
    """Show every operation to the recorder, and answer those that ask for values no fake tensor has.

    Args:
        recorder: told of every operation.
        truth: what ``mask.all()`` is: True where nothing is padded.
        selected: how many entries of a boolean mask of this shape are set (an upper bound where unknown).
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: FakeRecorder, truth: bool, selected: Callable[[tuple[int, ...]], int]) -> None:
        super().__init__()
        self._recorder = recorder
        self._truth = truth
        self._selected = selected
        self._foreign: dict[type, bool] = {}
        results = shortcut("results")
        known = results.known_results() if results is not None else None
        self._run: Callable[..., tuple[Any, int | None]] = known.run if known is not None else _dispatched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked for by C++ at every turn; nothing is made
            return args[0].fake_device if type(args[0]) is _FakeTensor else func(*args)
        kwargs = kwargs or {}
        for kind in types:
            if kind is not _FakeTensor and self._is_foreign(kind):
                return NotImplemented
        if kwargs and kwargs.get("pin_memory"):  # there is no device to pin for; the recorder counts it
            with self._recorder.storages.on_host():
                out = func(*args, **{**kwargs, "pin_memory": False})
                self._recorder.see(func, args, kwargs, out)
            return out
        special = _SPECIAL.get(id(func))
        if special is None:
            out, alike = self._run(func, args, kwargs)
        else:
            out, alike = special(self, func, args, kwargs), None
        self._recorder.see(func, args, kwargs, out, alike)
        return out

    def _is_foreign(self, kind: type) -> bool:
        answer = self._foreign.get(kind)
        if answer is None:
            plain = (torch.Tensor, torch.nn.Parameter, _FakeTensor)
            implements = getattr(kind, "__torch_dispatch__", _PLAIN)
            answer = kind not in plain and implements is not _PLAIN
            answer = self._foreign[kind] = answer and not issubclass(kind, _FakeTensor)
        return answer

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not isinstance(tensor, _FakeTensor):
            return func(*args, **kwargs)
        if tensor.constant is not None:
            return tensor.constant.item()
        return scalar_of(tensor)

    def _reduced(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, _FakeTensor):
            # Masks are asked by transformers whether anything is padded; elsewhere it is "is everything NaN?".
            out._memprof_scalar = self._truth and _asked_by("transformers")
        return out

    def _compared(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer TRL's question whether a batch had a token with a label: it has."""
        out = func(*args, **kwargs)
        if isinstance(out, _FakeTensor) and not out.dim() and _asked_by(_COUNTING):
            out._memprof_scalar = True
        return out

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer ``x[mask]``: the kernel finds the positions first, as an integer list of two columns at most."""
        source, indices = args[0], args[1]
        for tensor in (source, *indices):
            if isinstance(tensor, _FakeTensor):
                tensor.constant = None  # the fake mode would look up a made-up position in real data
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if not masks:
            return func(*args, **kwargs)
        plain: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            found = source.new_empty((self._selected(tuple(index.shape)), index.dim()), dtype=torch.int64)
            if self._recorder.cuda:  # a tensor trace on the CPU cannot see it either
                self._recorder.see(torch.ops.aten.nonzero.default, (index,), {}, found)
            plain += [found[:, i] for i in range(index.dim())]
        out = func(source, plain, *args[2:], **kwargs)
        self._recorder.see(func, args, kwargs, out)  # before the positions are given back
        return out

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Any:
        mask = args[0]
        return mask.new_empty((self._selected(tuple(mask.shape)), mask.dim()), dtype=torch.int64)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].new_empty((self._selected(tuple(args[1].shape)),))


def _dispatched(func: Any, args: Args, kwargs: Kwargs) -> tuple[Any, None]:
    return func(*args, **kwargs), None


_COUNTING = ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")  # they log averages over labelled tokens
_ATEN = torch.ops.aten
# By identity: operators live as long as torch does, and hashing one costs a call.
_SPECIAL: dict[int, Callable[[OperationTracking, Any, Any, Any], Any]] = {
    id(torch_names.LOCAL_SCALAR.get()): OperationTracking._scalar,
    id(_ATEN.all.default): OperationTracking._reduced,
    id(_ATEN.gt.Scalar): OperationTracking._compared,
    id(_ATEN.index.Tensor): OperationTracking._index,
    id(_ATEN.nonzero.default): OperationTracking._nonzero,
    id(_ATEN.masked_select.default): OperationTracking._masked_select,
}


def scalar_of(tensor: Any) -> Any:
    """Return the assumed value of a scalar nobody computed: the given answer of ``all``, else False, 1 or 1.0."""
    known = getattr(tensor, "_memprof_scalar", None)
    if known is not None:
        return known
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _asked_by(package: str | tuple[str, ...]) -> bool:
    """Tell whether the innermost Python code outside torch belongs to ``package``, or one of several."""
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith((__name__, "torch.", "contextlib")):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(package)
