"""Tell forward, backward and optimizer step apart inside a method that does all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.compat import torch as torch_names
from memprof.compat.patching import Patches
from memprof.recording.guard import FailureGuard
from memprof.vocabulary import Phase

#: What such a method is called where phases are given by method; no phase itself.
TRAIN = "train"


class TrainingPhases:
    """Record, while entered, the model's outermost forward, ``torch.autograd.backward`` and optimizer steps as phases.

    ``enter`` opens a phase and returns its mark, which ``leave`` closes. Everything hooked is taken back at the end.
    """

    def __init__(
        self, model: Any, enter: Callable[[str], Any], leave: Callable[[Any], None], guard: FailureGuard
    ) -> None:
        self._model = model
        self._guard = guard
        self._enter = enter
        self._leave = leave
        self._graph_task = torch_names.GRAPH_TASK.get()
        self._handles: list[Any] = []
        self._patches = Patches()
        self._forward: list[Any] = []
        self._step: list[Any] = []

    def __enter__(self) -> TrainingPhases:
        guard, unseen = self._guard, torch_names.IS_COMPILING.get()
        if hasattr(self._model, "register_forward_pre_hook"):
            begin = guard.hook(lambda *_: self._open(self._forward, Phase.FORWARD), unseen)
            end = guard.hook(lambda *_: self._close(self._forward), unseen)
            self._handles += [
                self._model.register_forward_pre_hook(begin),
                self._model.register_forward_hook(end, always_call=True),
            ]
        self._handles += [
            torch_names.BEFORE_STEP.get()(guard.hook(lambda *_: self._open(self._step, Phase.OPTIMIZER_STEP))),
            torch_names.AFTER_STEP.get()(guard.hook(lambda *_: self._close(self._step))),
        ]
        self._watch_backward()
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.restore()
        while self._handles:
            self._handles.pop().remove()
        for marks in (self._step, self._forward):
            while marks:
                self._leave(marks.pop())

    def _watch_backward(self) -> None:
        original = torch_names.BACKWARD.find()
        if not original:
            return  # a note of the recording says so

        enter, leave = (lambda *_: self._enter(Phase.BACKWARD.value)), (lambda mark, *_: self._leave(mark))
        self._patches.put(*torch_names.BACKWARD.place(), self._guard.around(original, enter, leave))

    def _open(self, marks: list[Any], phase: Phase) -> None:
        # A forward run again by checkpointing belongs to the backward that runs it.
        if phase is Phase.FORWARD and self._graph_task() != -1:
            return
        marks.append(self._enter(phase.value))

    def _close(self, marks: list[Any]) -> None:
        if marks:
            self._leave(marks.pop())
