"""Repeat the layers of a training step: their forward with gradients, and their backward.

The first layers and the last ones of a kind are executed, forward and backward. A layer in between is one node of
autograd's graph: its forward does what the first layers' logs say, where two of them agree, and keeps what they kept;
its backward does what the last layers' logs say. What lies between the gradients of a layer's result and of its input
is the layer's own, recomputation and the sums of its parameters' gradients included: the engine runs nothing else
meanwhile. Where the logs turn out to differ, a layer repeated in forward cannot go back: the simulation then begins
again, and executes all. So it does where the device is full inside a repeated layer.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memprof.allocator.model import OutOfMemory
from memprof.compat import torch as torch_names
from memprof.simulate.layers.circumstances import claims_of, known_by, modes, where
from memprof.simulate.layers.pattern import Before, Pattern, Place
from memprof.simulate.layers.structure import structure_of
from memprof.simulate.layers.values import NotAlike, Values
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.recorder.round_log import CallLog
from memprof.simulate.world.known_results import Making

__all__ = ["LayersDiffer", "RepeatedCall", "TrainedRow"]

_LAST = 2  # layers of a kind, which backward meets first
_FakeTensor: Any = torch_names.FAKE_TENSOR.get()
_graph_task: Any = torch_names.GRAPH_TASK.get()
_Run = Callable[[], Any]


class LayersDiffer(Exception):
    """Layers that were alike in forward are not in backward: all must be executed."""


class TrainedRow:
    """Hold the layers of one model, as they are trained."""

    def __init__(self, recorder: FakeRecorder, make: Making, layers: list[nn.Module]) -> None:
        self.recorder, self.make = recorder, make
        self._layers = layers
        self._last = len(layers)
        self._pass = _Pass(frozenset())
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()
        self._window: _Window | None = None

    def called(self, number: int, layer: nn.Module, run: _Run, args: Any, kwargs: Any) -> Any:
        """Do one call of a layer with gradients, by executing it (``run``) or as those before it."""
        if number <= self._last:
            self._begin_pass()
        self._last = number
        try:
            call = _Call(self.recorder, layer, args, kwargs)
        except NotAlike:
            return run()
        holds = self._pass.holds_input(call.key) if number not in self._pass.executed_at else None
        if holds is not None:
            repeated = RepeatedCall(self, self._pass, call, holds_input=holds)
            self._pass.repeated.add(repeated)
            return _Node.apply(call.hidden(), repeated)  # type: ignore[no-untyped-call]
        return self._executed(call, run, number)

    def _begin_pass(self) -> None:
        if self._window is not None:  # no gradient came to its end
            self.recorder.end_call_log(self._window.log)
            self._window = None
        self._pass = _Pass(frozenset(self._last_of_kinds()))
        self._passes.add(self._pass)

    def _last_of_kinds(self) -> list[int]:
        kinds: dict[Any, list[int]] = {}
        for number, layer in enumerate(self._layers):
            try:
                kind = structure_of(layer, self.recorder.scope.name_of(layer)[0])
            except NotAlike:
                continue
            kinds.setdefault(kind, []).append(number)
        last = _LAST if self.recorder.engine_has_workspace else _LAST + 1  # the first product takes it
        return [number for numbers in kinds.values() for number in numbers[-last:]]

    def _executed(self, call: _Call, run: _Run, number: int) -> Any:
        """Execute a call and log what it does; of the last of its kind, in backward too."""
        here, hidden = self._pass, weakref.ref(call.hidden())
        before = call.let_go()
        with self.recorder.logging_call() as log:
            out = run()
        try:
            left = _result(out, hidden())
            found: Pattern | None = Pattern(self.recorder, self.make, call.place, log, before, [left], keeps=True)
        except NotAlike:
            found = None
        done = _Executed(call, found, self.recorder)
        here.learn(call.key, found, done)
        source = getattr(hidden(), "grad_fn", None)
        if found is not None and number in here.executed_at and source is not None:
            out.grad_fn.register_prehook(lambda grads: self._begin_window(here, done, grads))
            source.register_prehook(lambda grads: self._end_window(grads, done))
        return out

    # -- backward -----------------------------------------------------------------------------------------------

    def _begin_window(self, here: _Pass, done: _Executed, grads: Sequence[Any]) -> None:
        """Begin to log a layer's backward, where the gradient of its result is there."""
        self._end_window(grads)
        if len(grads) != 1 or not self._is_free():
            return
        gone = done.gone()
        try:
            values, key = done.call.backward_key(self.recorder, grads[0], gone)
        except NotAlike:
            return
        if gone != done.released:
            here.backward[key] = None
            return
        blocks = [None if number in gone else address for number, address in enumerate(done.kept)]
        before = Before(values, self.recorder, blocks)
        self._window = _Window(here, done, key, before, self.recorder.begin_call_log())

    def _end_window(self, grads: Sequence[Any], done: _Executed | None = None) -> None:
        """End the log, where the gradient of the layer's input is there."""
        window = self._window
        if window is None or (done is not None and window.done is not done):
            return
        self._window = None
        self.recorder.end_call_log(window.log)
        call = window.done.call
        try:
            left = [*grads, *(parameter.grad for parameter in call.parameters)]
            found = Pattern(self.recorder, self.make, call.place, window.log, window.before, left)
        except NotAlike:
            window.here.backward[window.key] = None
            return
        window.here.learn_backward(window.key, found)

    def _is_free(self) -> bool:
        recorder = self.recorder
        return not (recorder.logs_call or recorder.paused) and recorder.rehearsal is None

    def cache_cleared(self) -> None:
        """Let repeated layers give back what executed ones had in autocast's cache, which was emptied now."""
        if _graph_task() != -1:
            return
        for one in list(self._passes):
            one.let_go_with_cache()


class _Pass:
    """Know the layers of one forward, and of its backward: patterns by what is given, and which two agreed on.

    ``executed_at``: the numbers of layers that are executed whatever is known.
    """

    def __init__(self, executed_at: frozenset[int]) -> None:
        self.executed_at = executed_at
        self.backward: dict[Any, Pattern | None] = {}
        self.repeated: weakref.WeakSet[RepeatedCall] = weakref.WeakSet()
        self._forward: dict[Any, Pattern | None] = {}
        self._sure: set[Any] = set()
        self._sure_backward: set[Any] = set()
        self._executed: list[_Executed] = []

    def holds_input(self, key: Any) -> bool | None:
        """Tell whether such a layer's graph holds its input; None where it is not known what such a layer does.

        The first layer's is the embedding's result, which others hold too."""
        if key not in self._sure:
            return None
        held = {done.call.input_lives() for done in self._executed[1:] if done.call.key == key}
        return held.pop() if len(held) == 1 else None

    def learn(self, key: Any, found: Pattern | None, done: _Executed) -> None:
        """Note what an executed call did."""
        known = self._forward.get(key)
        if known is not None and found is not None and known.key == found.key:
            self._sure.add(key)
        elif key in self._sure:
            self._sure.discard(key)  # and whoever was repeated finds no backward
            self.backward.clear()
        self._forward[key] = found
        self._executed.append(done)

    def forward_of(self, key: Any) -> Pattern:
        """Return what the forward of a layer does that :meth:`holds_input` knows."""
        found = self._forward[key]
        assert found is not None
        return found

    def learn_backward(self, key: Any, found: Pattern) -> None:
        """Note what the backward of an executed layer did."""
        known = self.backward.get(key)
        if known is not None and known.key == found.key:
            self._sure_backward.add(key)
        self.backward[key] = found

    def backward_of(self, key: Any) -> Pattern:
        """Return what the backward of such a layer does.

        Raises:
            LayersDiffer: it is not known.
        """
        found = self.backward.get(key)
        if found is None or key not in self._sure_backward:
            raise LayersDiffer("the backward of a layer is not that of the last ones")
        return found

    def let_go_with_cache(self) -> None:
        """Let repeated layers give back what has gone of what executed ones kept."""
        released: dict[Any, tuple[int, ...]] = {}
        for done in self._executed:
            done.released = done.gone()
            released.setdefault(done.call.key, done.released)
        for repeated in list(self.repeated):
            repeated.let_go(released.get(repeated.call.key, ()))


class _Window(NamedTuple):
    """Hold a log of a layer's backward while it is kept."""

    here: _Pass
    done: _Executed
    key: Any
    before: Before
    log: CallLog


class _Call:
    """Know one call of a layer by all that decides what it does.

    Raises:
        NotAlike: something it is given is not known to say all about itself, or more happens than the call.
    """

    def __init__(self, recorder: FakeRecorder, layer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if any(hooks.of(layer) for hooks in _LAYER_HOOKS):
            raise NotAlike("the layer has hooks")
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self._check_parameters()
        values = Values()
        given = values.add(args), values.add(kwargs)
        differentiated = [number for number, tensor in enumerate(values.tensors) if tensor.requires_grad]
        if len({id(values.tensors[number]) for number in differentiated}) != 1:
            raise NotAlike("not one of its inputs has a gradient")
        self._hidden = differentiated[0]
        self._held: Any = values.tensors[self._hidden]
        self._given = [weakref.ref(tensor) for tensor in values.tensors]
        self._values: Values | None = values
        names, self.key = known_by(recorder, layer, given, values)
        self.place = Place(names, -1)
        self._recorder = recorder

    def _check_parameters(self) -> None:
        for parameter in self.parameters:
            if type(parameter) is not _FakeTensor and type(parameter) is not nn.Parameter:
                raise NotAlike("a parameter is not dense")
            if any(hooks.of(parameter) for hooks in _GRADIENT_HOOKS):
                raise NotAlike("a parameter has hooks")

    def hidden(self) -> Any:
        """Return the input that has a gradient."""
        return self._held

    def input_lives(self) -> bool:
        """Tell whether anybody holds the input that has a gradient."""
        return self._given[self._hidden]() is not None

    def let_go_of_input(self) -> None:
        """Hold the input that has a gradient no longer."""
        self._held = None

    def let_go(self) -> Before:
        """Note the tensors that are there, and hold none of them any longer."""
        assert self._values is not None
        before = Before(self._values, self._recorder)
        self._values = self._held = None
        return before

    def tensors(self) -> list[Any]:
        """Hand over the tensors of the call; from then on only the input that has a gradient is held."""
        assert self._values is not None
        tensors, self._values = self._values.tensors, None
        return tensors

    def backward_key(self, recorder: FakeRecorder, grad: Any, gone: tuple[int, ...]) -> tuple[Values, Any]:
        """Describe what is there when the layer's backward begins: tensors of the call, gradients, circumstances.

        Raises:
            NotAlike: a tensor is not known to say all about itself, or a parameter has got hooks.
        """
        self._check_parameters()
        values = Values()
        there = [grad, *(given() for given in self._given), *(parameter.grad for parameter in self.parameters)]
        described = values.add(there)
        claims = claims_of(recorder, values.tensors)
        above = where(torch_names.ENGINE.name)
        return values, (self.key, described, claims, gone, *modes(recorder), above)


_LAYER_HOOKS = (
    torch_names.BEFORE_HOOKS,
    torch_names.AFTER_HOOKS,
    torch_names.BEFORE_BACKWARD_HOOKS,
    torch_names.AFTER_BACKWARD_HOOKS,
)
_GRADIENT_HOOKS = (torch_names.GRADIENT_HOOKS, torch_names.ACCUMULATED_HOOKS)


class _Executed:
    """Know an executed call: what of it autograd's graph and autocast's cache kept.

    ``kept``: addresses; ``released``: which of them went when the cache was emptied.
    """

    def __init__(self, call: _Call, pattern: Pattern | None, recorder: FakeRecorder) -> None:
        self.call = call
        self.released: tuple[int, ...] = ()
        self.kept = pattern.kept_at() if pattern is not None else []
        self._recorder = recorder
        self._watches = recorder.watches_at(self.kept)

    def gone(self) -> tuple[int, ...]:
        """List which of what was kept is no longer there."""
        return tuple(number for number, watch in enumerate(self._watches) if not self._recorder.stands(watch))


class RepeatedCall:
    """Hold what a repeated call needs for its backward."""

    def __init__(self, row: TrainedRow, here: _Pass, call: _Call, *, holds_input: bool) -> None:
        self._row, self._here, self.call = row, here, call
        self._holds_input = holds_input
        self._kept: list[Any] = []
        self._gone: tuple[int, ...] = ()
        self._done = False

    def forward(self) -> Any:
        """Do what the layer's forward does; return its result."""
        pattern = self._here.forward_of(self.call.key)
        left, self._kept = pattern.repeat_keeping(self.call.place, self.call.tensors())
        if not self._holds_input:
            self.call.let_go_of_input()
        return left[0]

    def let_go(self, released: tuple[int, ...]) -> None:
        """Give back these of what is kept."""
        if not self._done and self._kept:
            self._gone = released
            for number in released:
                self._kept[number] = None

    def backward(self, grad: Any) -> Any:
        """Do what the layer's backward does; return the gradient of its input.

        Raises:
            LayersDiffer: what that is cannot be told.
        """
        row, call = self._row, self.call
        if self._done or not row._is_free():
            raise LayersDiffer("a layer's backward runs where it cannot be repeated")
        self._done = True
        try:
            values, key = call.backward_key(row.recorder, grad, self._gone)
        except NotAlike as error:
            raise LayersDiffer(str(error)) from error
        pattern = self._here.backward_of(key)
        of_input, *grads = pattern.repeat(call.place, [*values.tensors, *self._kept])
        for parameter, found in zip(call.parameters, grads, strict=True):
            if parameter.grad is not found:
                parameter.grad = found
        self._kept = []
        call.let_go_of_input()
        return of_input


@contextlib.contextmanager
def _no_room_for_repeating() -> Iterator[None]:
    """Where the device is full, let all be executed: what is given back then is what a layer's own code holds."""
    try:
        yield
    except OutOfMemory as error:
        raise LayersDiffer("the device is full inside a repeated layer") from error


class _Node(torch.autograd.Function):
    """Stand for a repeated layer in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, repeated: RepeatedCall) -> Any:
        ctx.repeated = repeated
        with _no_room_for_repeating():
            return repeated.forward()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        with _no_room_for_repeating():
            return ctx.repeated.backward(grad), None


def _result(out: Any, hidden: Any) -> Any:
    """Return a layer's result without its graph.

    Raises:
        NotAlike: it is more than one new tensor.
    """
    if type(out) is not _FakeTensor or out is hidden or out.grad_fn is None:
        raise NotAlike("its result is not one new tensor")
    with torch.no_grad():
        return out.detach()
