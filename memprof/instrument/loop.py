"""A training loop without a trainer, recorded from outside: models, optimizers and phases found by torch's own hooks.

What is known of a loop is what it calls: a module's forward that nobody else's forward called, ``backward``, gradient
clipping, an optimizer's step, transformers' ``generate``. A step is over when an optimizer has stepped and the next
forward (or generation) begins. Phases the script marks with :func:`memprof.phase` have precedence.
"""

from __future__ import annotations

import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from memprof.analysis.ranks.run_folders import RUN_FOLDER
from memprof.compat import missing, require
from memprof.compat import torch as torch_names
from memprof.compat.patching import Patches
from memprof.compat.transformers import GENERATE
from memprof.foreign import Args, Kwargs
from memprof.instrument.loading import LoadWatch
from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.callback.options import Options
from memprof.integrations.run_recorder.recorder import Driver, RunRecorder
from memprof.recording import phases
from memprof.recording.api import make_recorder
from memprof.recording.guard import FailureGuard, guarded, on_stderr
from memprof.recording.phases import PhaseInterval
from memprof.recording.session import Session
from memprof.vocabulary import Phase

# The first two steps: optimizer state is made in one and there in the next.
_FIRST_STEPS = 2
# Entries kept: a loop without an end, or without an optimizer, must not fill the memory it watches.
_RING = 500_000
_HIDDEN = str(Path(__file__).resolve().parent) + "/"


class PlainLoop:
    """Hooks into torch until the chosen steps are recorded, by the callback's ``options``; prints the ``table``."""

    def __init__(self, options: Options, table: bool = True) -> None:
        self._steps = None if options.steps is None else frozenset(options.steps)
        self._every = options.every
        self._options, self._table = options, table
        folder = options.output_dir or Path(RUN_FOLDER)
        self.guard = FailureGuard("loop", lost="the steps being recorded", say=on_stderr)
        driver = Driver(self._unhook, self._session_ends, report=self._report)
        self._recorder = RunRecorder(folder, self.guard, driver, max_disk=options.max_disk)
        self.guard.on_failure(self._recorder.abandon)
        self._thread = threading.get_ident()
        self._step = 1
        self._stepped = False
        self._depth = 0
        self._marks: list[PhaseInterval | None] = []
        self._models: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._optimizer_mark: PhaseInterval | None = None
        self._handles: list[Any] = []
        self._patches = Patches()
        self._left_to_script = False
        self._ranks_asked = False
        self._loading = LoadWatch(options, self._ran_out_while_loading)
        self._load_snapshot: Path | None = None
        self._unseen = torch_names.IS_COMPILING.get()

    # -- life --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hook into torch, which has been imported."""
        import torch

        require("run")
        self._handles = [
            torch_names.BEFORE_FORWARD.get()(self.guard.hook(self._before_forward, self._unseen)),
            torch_names.AFTER_FORWARD.get()(self.guard.hook(self._after_forward, self._unseen), always_call=True),
            torch_names.BEFORE_STEP.get()(self.guard.hook(self._before_step, self._unseen)),
            torch_names.AFTER_STEP.get()(self.guard.hook(self._after_step, self._unseen)),
        ]
        # Optional ones: what is missing is noted in the recording.
        self._wrap(torch.autograd, torch_names.BACKWARD.name, Phase.BACKWARD)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._wrap(owner, torch_names.CLIP.name, Phase.OPTIMIZER_STEP)
        self._loading.begin()

    def loaded(self) -> None:
        """Note that a model runs: loading is over, and memory that ran out meanwhile did not end the script."""
        self._loading.end()
        if self._load_snapshot is not None:
            self._recorder.writing.forget(self._load_snapshot)
            self._load_snapshot = None

    def watch_generation(self, mixin: Any) -> None:
        """Mark transformers' ``generate`` as a phase; it may be imported later than torch."""
        if not self._recorder.is_over:
            self._wrap(mixin, GENERATE.name, Phase.GENERATE)

    @guarded
    def end(self) -> None:
        """Write what is recorded, put everything back, report."""
        self.guard.run_pending_undo()
        if not self._recorder.is_over:
            self._recorder.finish()

    @property
    def recorded(self) -> bool:
        """Tell whether anything was recorded: a forward in a chosen step, or memory that ran out before."""
        return self._recorder.step > 0 or self._load_snapshot is not None

    @property
    def untouched(self) -> bool:
        """Tell whether nothing was recorded, though nothing failed and the script recorded nothing itself."""
        return not (self.recorded or self._left_to_script or self.guard.failure)

    def _session_ends(self, session: Session) -> None:
        self._marks, self._optimizer_mark = [], None

    def _report(self, waited_for: bool) -> None:
        if waited_for and self._recorder.snapshots and self._options.report:
            self._recorder.report("stderr", self._table, page=True)

    def _unhook(self) -> None:
        self._loading.end()
        self._patches.restore()
        while self._handles:
            self._handles.pop().remove()

    # -- what the loop does ------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._elsewhere():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self.loaded()
        self._next_step()
        module = self._model_of(module)
        self._begin_if_due(module)
        if (session := self._recorder.session) is not None:
            role = self._introduce(session, module)
            session.owners.claim_inputs(args)
            self._marks.append(self._enter(_phase_of_forward(module, role)))

    def _after_forward(self, module: Any, _args: Any, _output: Any) -> None:
        if self._elsewhere() or not self._depth:
            return
        self._depth -= 1
        if not self._depth and self._marks:
            self._recorder.leave(self._marks.pop())

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._elsewhere() and self._recorder.session is not None:
            self._depth = 0  # an exception somebody caught may have skipped a forward's end
            self._optimizer_mark = self._enter(Phase.OPTIMIZER_STEP)

    def _after_step(self, _optimizer: Any, *_: Any) -> None:
        if not self._elsewhere():
            self._stepped = True
            mark, self._optimizer_mark = self._optimizer_mark, None
            self._recorder.leave(mark)

    def _next_step(self) -> None:
        if not self._stepped:
            return
        self._stepped = False
        self._step += 1
        if self._recorder.session is None:
            return
        if self._wanted(self._step):
            self._recorder.session.set_step(self._step)
        else:
            self._recorder.write_recording()
            if self._steps is None and self._every is None:
                self._unhook()

    def _wrap(self, owner: Any, name: str, phase: Phase) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        def before(args: Args, _kwargs: Kwargs) -> PhaseInterval | None:
            if self._elsewhere():
                return None
            if phase is Phase.GENERATE:
                self._before_generation(args)
            return self._enter(phase)

        leave = lambda mark, *_: self._recorder.leave(mark)  # noqa: E731
        self._patches.put(owner, name, self.guard.around(original, before, leave, self._unseen))

    def _before_generation(self, args: tuple[Any, ...]) -> None:
        if not self._depth and args:
            self.loaded()
            self._next_step()
            self._begin_if_due(args[0])

    # -- recording ---------------------------------------------------------------------------------------------

    def _wanted(self, step: int) -> bool:
        if self._steps is None and self._every is None:
            return step <= _FIRST_STEPS
        return step in (self._steps or ()) or (self._every is not None and step % self._every == 0)

    def _begin_if_due(self, module: Any) -> None:
        self._left_to_script |= bool(phases.ACTIVE) and self._recorder.session is None
        if self._recorder.session is not None or not self._wanted(self._step) or phases.ACTIVE:
            return  # where the script records itself, it knows better
        parameter = next(module.parameters(), None)
        if parameter is None or parameter.is_meta:
            return
        options = self._options
        recorder = make_recorder(
            parameter.device,
            options.kind,
            max_entries=options.max_entries or _RING,
            stacks=options.stacks,
            capacity=options.capacity,
            hidden=[_HIDDEN],
            reset_peaks=options.reset_peaks,
        )
        session = Session(recorder, config=_facts(module), guard=self.guard, redact=options.redact)
        session.notes += missing("run")
        self._recorder.step = self._step
        writing = self._recorder.writing
        writing.rank = session.rank  # known by now, where the script sets RANK itself
        if session.world_size > 1 and not self._ranks_asked:
            self._ranks_asked = True
            writing.identity = Gathering(session.rank, session.world_size, name="loop").agree_on_identity()
        self._recorder.begin(session)
        self._recorder.record(self._step)
        session.set_step(self._step)
        scope = getattr(recorder, "scope", None)
        if scope is not None and self._depth:
            scope.enter(module)  # its own hook came too late for this one
        self._recorder.terminations.start()

    def _model_of(self, module: Any) -> Any:
        """Return the model that ``module`` is a part of, where a loop calls ``model.forward(...)`` and not the model.

        Such a call runs no hook of the model's own; its frames are below the part's.
        """
        if (found := self._models.get(module)) is not None and (model := found()) is not None:
            return model
        import torch

        model, frame = module, sys._getframe(1)
        while (caller := frame.f_back) is not None:
            frame = caller
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            if isinstance(owner, torch.nn.Module) and any(part is model for part in owner.modules()):
                model = owner
        self._models[module] = weakref.ref(model)
        return model

    def _introduce(self, session: Session, module: Any) -> str:
        """Claim the module by its role: what learns is the policy, what is frozen a reference or a reward model."""
        known = {id(model): role for model, role in session.owners.models}
        if id(module) in known:
            return known[id(module)]
        parameters = list(module.parameters())
        if not parameters:
            return ""
        role = "policy"
        if not any(p.requires_grad for p in parameters):
            sizes = [sum(p.numel() for p in m.parameters()) for m, r in session.owners.models if r == "policy"]
            role = "reference" if sum(p.numel() for p in parameters) in sizes else "reward"
            note = f"{type(module).__name__} has no trainable parameter and was taken for a {role} model"
            if note not in session.notes:
                session.notes.append(note)
        session.add_model(module, role)
        session.look_again()
        return role

    def _enter(self, phase: Phase | None) -> PhaseInterval | None:
        session = self._recorder.session
        if phase is None or session is None or session.phases.current is not None:
            return None
        return session.enter_phase(phase.value)

    def _ran_out_while_loading(self, session: Session) -> None:
        self._recorder.writing.rank = session.rank
        self._load_snapshot = self._recorder.writing.now(session, 0)

    def _elsewhere(self) -> bool:
        """Tell whether another thread works: the recorder sees it (data loading, servers), and it marks no phase."""
        return self._recorder.is_over or threading.get_ident() != self._thread


def _phase_of_forward(module: Any, role: str) -> Phase | None:
    import torch

    if role in ("reference", "reward"):
        return Phase.REFERENCE_LOGPROBS if role == "reference" else Phase.REWARD
    if torch.is_grad_enabled():
        return Phase.FORWARD
    return None if module.training else Phase.EVALUATE


def _facts(module: Any) -> dict[str, Any]:
    parameters = list(module.parameters())
    return {
        "trainer": "plain loop",
        "model_name": type(module).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
    }
