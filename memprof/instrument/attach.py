"""Watching a worker that has no Trainer: an actor, critic or rollout process of verl, OpenRLHF, NeMo-RL and the like.

Inside the worker::

    watch = memprof.attach(model=model, optimizer=optimizer, role="actor", output_dir="/shared/memprof")
    watch.methods(self, generate_sequences="generate", compute_log_prob="old_logprobs")   # or: with watch.phase(...)

A ring with stacks runs from then on. It is written when memory runs out, when :meth:`Attachment.dump` is called, and
when the driver asks: through Ray (:func:`memprof.collect`) or through a file (:func:`memprof.request_dump`).
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memprof.compat import missing, require
from memprof.errors import UsageError, import_for
from memprof.instrument.training_method import TRAIN, TrainingPhases
from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.run_recorder.output import write_report
from memprof.integrations.run_recorder.recorder import Driver, RunRecorder
from memprof.integrations.run_recorder.run_folder import claim_folder, moved_sentence
from memprof.recording.api import device_of, make_recorder, switched_off
from memprof.recording.guard import FailureGuard, MethodPatcher, as_warning, guarded, on_stderr
from memprof.recording.owners import unwrap_optimizer
from memprof.recording.phases import PhaseInterval, phase_id
from memprof.recording.recorder import RunIdentity
from memprof.recording.session import Session
from memprof.recording.system.inference_engine import runner_of
from memprof.vocabulary import Kind, Phase

if TYPE_CHECKING:
    from memprof.integrations.run_recorder.rehearsal import Rehearsed

# A worker's role, and what its model's parameters are then.
_ROLES = {
    "actor": "policy", "policy": "policy", "critic": "value", "value": "value", "reference": "reference",
    "ref": "reference", "reward": "reward", "rollout": "engine", "engine": "engine",
}  # fmt: skip
# Entries the ring of a tensor trace keeps; CUDA's keeps a million.
_RING = 200_000
# A file the driver leaves in the folder of all workers.
REQUEST = "dump.request"

_attached: dict[str, Attachment] = {}


def attach(
    model: Any = None,
    optimizer: Any = None,
    *,
    role: str = "actor",
    reference_model: Any = None,
    output_dir: str | os.PathLike[str] = "_memprof",
    rank: int | None = None,
    world_size: int | None = None,
    device: Any = None,
    kind: str = "auto",
    max_entries: int | None = None,
    stacks: str | None = "python",
    config: Mapping[str, Any] | None = None,
    redact: bool = False,
) -> Attachment:
    """Begin to watch this process. With ``MEMPROF=0`` in the environment, and where recording cannot begin, nothing is.

    Args:
        model: what this worker runs: a module, or a wrapper of it (FSDP, DistributedDataParallel); a vLLM (``LLM``, its
            engine or a worker of it), whose KV cache and buffers are known then too.
        optimizer: whose state is to be known; optimizers that step are found without it.
        role: ``actor``, ``critic``, ``reference``, ``reward`` or ``rollout``.
        reference_model: another model in the same worker.
        output_dir: a folder for all workers; each role writes into a folder of its own in it, numbered (``actor-2``) if
            an earlier run has written there.
        rank, world_size: this worker's place among those of its role; by default the process group's, else the
            environment's.
        device, kind, max_entries, stacks: as in :func:`memprof.record`.
        config: facts about the run, kept with it.
        redact: leave this machine's paths and name out of what is written.

    Raises:
        UsageError: an unknown role, this process has one attached already, or torch lacks what this needs.
    """
    if role not in _ROLES:
        raise UsageError(f"role={role!r} is not known; use one of {', '.join(_ROLES)}.")
    if role in _attached:
        raise UsageError(f"this process has a {role!r} attached already; detach it first.")
    import_for("memprof.attach", "torch", {"torch": "record"})
    place = _place(rank, world_size)
    if switched_off():
        return Attachment(role, Path(output_dir) / role, place[0])
    require("attach")
    watch = _claimed(role, Path(output_dir) / role, place, agrees=rank is None and world_size is None)
    try:
        runner = runner_of(model)
        model = model if runner is None else runner.model
        where = device_of(model) if device is None else device
        recorder = make_recorder(where, kind, max_entries=max_entries, stacks=stacks)
        if recorder.kind is Kind.TRACE and max_entries is None:
            recorder = make_recorder(where, kind, max_entries=_RING, stacks=stacks)
        facts = {"role": role, **(config or {})}
        session = Session(recorder, config=facts, rank=place[0], world_size=place[1], redact=redact, guard=watch.guard)
        for one, what in ((model, _ROLES[role]), (reference_model, "reference")):
            if one is not None:
                session.add_model(one, what)
        session.owners.add_inference_engine(runner)
        if optimizer is not None:
            session.owners.add_optimizer(optimizer)
        session.notes += missing("attach")
        watch._asked = time.time()
        watch._recorder.begin(session, lambda: watch.dump("memory ran out"))
    except UsageError:
        raise
    except Exception as error:
        watch.guard.shut(error)
        return watch
    watch._given = (model, optimizer)
    _attached[role] = watch
    return watch


def _claimed(role: str, folder: Path, place: tuple[int, int], agrees: bool) -> Attachment:
    """Return an attachment that writes to a folder without another run; ``agrees``: ranks are the process group's."""
    rank, world_size = place
    ranks = Gathering(rank, world_size, name=f"attach/{role}") if agrees or world_size == 1 else None
    own = claim_folder(folder, world_size == 1, lambda own: None if ranks is None else ranks.agree_on("folder", own))
    if rank == 0 and (moved := moved_sentence(folder, own)):
        on_stderr(moved)
    identity = RunIdentity(None, RunIdentity.new().started) if ranks is None else ranks.agree_on_identity()
    return Attachment(role, own, rank, identity)


def attached(role: str | None = None) -> Attachment | None:
    """Return what this process has attached: of ``role``, or the first."""
    if role is not None:
        return _attached.get(role)
    return next(iter(_attached.values()), None)


class Attachment:
    """Watch a worker; made by :func:`attach`. Nothing here raises into the worker.

    Attributes:
        role: as given.
        folder: where its files go.
        rank: its place.
    """

    def __init__(self, role: str, folder: Path, rank: int, identity: RunIdentity | None = None) -> None:
        self.role = role
        self.folder = folder
        self.rank = rank
        self.guard = FailureGuard("worker", "what the ring contains, from here on")
        self._recorder = RunRecorder(
            folder, self.guard, Driver(self._unhook, ended=self._ended), rank=rank, ring=True, identity=identity
        )
        self._given: tuple[Any, Any] = (None, None)
        self._seams: MethodPatcher | None = None
        self._asked = 0.0
        self._dumping = threading.RLock()  # the driver, the worker and its out-of-memory hook may dump at once

    @property
    def snapshots(self) -> list[Path]:
        return self._recorder.snapshots

    # -- what a worker calls -----------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Mark what the code inside does; record out of memory in it, and let the error pass on."""
        mark = self.guard(self._recorder.enter, phase_id(name), step)
        try:
            yield
        except BaseException as error:
            self.guard(self._failed, error)
            raise
        finally:
            self.guard(self._leave, mark)

    @guarded
    def step(self, number: int) -> None:
        """Set the training step that runs from now on."""
        self._recorder.step = number
        if self._recorder.session is not None:
            self._recorder.session.set_step(number)

    def methods(self, worker: Any, **phases: str) -> list[str]:
        """Wrap methods of ``worker`` so that each is a phase: ``methods(self, generate="generate", update="train")``.

        Returns the names that were wrapped. A warning, and a note of the report, name the others: the worker has no
        such method, or it is a generator.

        ``"train"`` is for a method that does everything: forward, backward and optimizer step are told apart inside.
        Calls of this object are marked until :meth:`detach`, those that Ray makes by ``.remote()`` too, and those of
        coroutine functions while they are awaited.

        Raises:
            UsageError: a phase that is none.
        """
        names = {method: phase if phase == TRAIN else phase_id(phase) for method, phase in phases.items()}
        if (session := self._recorder.session) is None:
            return []
        if self._seams is None:
            self._seams = MethodPatcher(self.guard, self._failed)
        wrapped = [m for m, phase in names.items() if self._wrap(worker, m, phase)]
        if missed := [method for method in names if method not in wrapped]:
            sentence = (
                f"{type(worker).__name__} has no method that can be marked as a phase with the name "
                f"{' or '.join(missed)}"
            )
            session.notes.append(sentence)
            as_warning(f"memprof: {sentence}; the others are watched.", 2)
        return wrapped

    def rehearse(self, step: Callable[..., Any], *batch: Any) -> Rehearsed | None:
        """Run ``step(*batch)`` once before training, on the worst batch there can be, and put everything back.

        ``step`` does what an update does: forward, backward, the optimizer's step. The optimizer's state exists before
        it, as it does later. Parameters, gradients, optimizer state and random numbers are then what they were.
        Returns its peak and the snapshot written; None where this process is not watched.

        Raises:
            UsageError: ``attach`` was given no model or optimizer that could be put back.
            BaseException: what ``step`` raises; where memory ran out, the snapshot is written first.
        """
        session, (model, optimizer) = self._recorder.session, self._given
        if session is None:
            return None
        import torch

        from memprof.integrations.run_recorder.rehearsal import Rehearsed, rehearse
        from memprof.integrations.run_recorder.state_backup import StateBackup, make_optimizer_state

        inner = unwrap_optimizer(optimizer) if optimizer is not None else None
        if not isinstance(model, torch.nn.Module) or not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                "rehearse() puts weights and optimizer back: attach(model=..., optimizer=...) with a torch module and "
                "a torch optimizer (DeepSpeed and Megatron store theirs elsewhere)."
            )

        def update() -> None:
            make_optimizer_state(inner)
            with TrainingPhases(model, self._recorder.enter, self._recorder.leave, self.guard):
                step(*batch)

        try:
            peak = rehearse(session, update, StateBackup(model, inner), self._failed)
        finally:
            session.set_step(self._recorder.step)
        return Rehearsed(peak, self.dump("a step was rehearsed"))

    def dump(self, reason: str = "asked for") -> Path | None:
        """Write what the ring holds now; return the snapshot's path, or None where that failed."""
        session = self._recorder.session
        return None if session is None else self._write(session, reason)

    def _write(self, session: Session, reason: str) -> Path | None:
        writing, step = self._recorder.writing, self._recorder.step

        def write() -> Path:
            session.notes = [*(n for n in session.notes if not n.startswith("written ")), f"written because {reason}"]
            return writing.now(session, step)

        with self._dumping:
            path: Path | None = FailureGuard("worker", str(writing.path_of(step)))(write)
        return path

    def report(self, path: Path | None = None) -> dict[str, Any] | None:
        """Return the report of a snapshot (the newest), its JSON written beside it; None where there is none."""
        path = path or (self.snapshots[-1] if self.snapshots else None)
        if path is None:
            return None
        written = FailureGuard("worker", f"the report of {path}")(write_report, path)
        return None if written is None else written.to_dict()

    @guarded
    def detach(self, dump: bool = True) -> Path | None:
        """Stop watching; write what the ring holds unless ``dump`` is false. Return the snapshot's path, if any."""
        session = self._recorder.session
        self._recorder.end()
        return self._write(session, "the worker was done") if dump and session is not None else None

    # -- our own -----------------------------------------------------------------------------------------------

    def _unhook(self) -> None:
        if self._seams is not None:
            self._seams.restore()
        # The session's hooks hold this object: with the model it would be a circle, and stay until collected.
        self._seams, self._given = None, (None, None)

    def _ended(self, failed: bool) -> None:
        if _attached.get(self.role) is self:
            del _attached[self.role]

    def _leave(self, mark: PhaseInterval | None) -> None:
        self._recorder.leave(mark)
        session = self._recorder.session
        if mark is not None and session is not None and session.phases.depth == 0 and self._is_asked():
            self.report(self.dump("the driver asked for it"))

    def _wrap(self, worker: Any, method: str, phase: str) -> bool:
        assert self._seams is not None
        original = getattr(worker, method, None)
        if inspect.isgeneratorfunction(original) or inspect.isasyncgenfunction(original):
            return False  # it runs later, between its caller's steps
        if phase == TRAIN:
            return self._seams.wrap_for_callers_of_the_class(worker, method, self._train, self._trained)
        enter = lambda *_: self._recorder.enter(phase)  # noqa: E731
        return self._seams.wrap_for_callers_of_the_class(worker, method, enter, lambda mark, *_: self._leave(mark))

    def _train(self, *_: Any) -> tuple[PhaseInterval | None, TrainingPhases] | None:
        """Enter a method that trains: tell its phases apart until it ends."""
        recorder = self._recorder
        if recorder.session is None:
            return None
        mark = recorder.enter(Phase.OTHER.value)
        model = next((m for m, _ in recorder.session.owners.models), None)
        return mark, TrainingPhases(model, recorder.enter, recorder.leave, self.guard).__enter__()

    def _trained(self, token: Any, *_: Any) -> None:
        if token is not None:
            mark, inside = token
            inside.__exit__()
            self._leave(mark)

    def _failed(self, error: BaseException) -> None:
        """Write if the exception that leaves the worker's code says that memory ran out."""
        import torch

        session = self._recorder.session
        if session is None or not isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
            return
        path = self._recorder.writing.path_of(self._recorder.step)
        if path not in self.snapshots or session.recorder.oom() is None:
            self.dump("memory ran out")
        self.report(path)

    def _is_asked(self) -> bool:
        """Tell whether the driver has asked since the last time."""
        try:
            when = (self.folder.parent / REQUEST).stat().st_mtime
        except OSError:
            return False
        asked, self._asked = when > self._asked, max(when, self._asked)
        return asked


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return ``(rank, world size)``: as given, of the process group, or of the environment."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return (dist.get_rank() if rank is None else rank, dist.get_world_size() if world_size is None else world_size)
    return (
        int(os.environ.get("RANK", 0)) if rank is None else rank,
        int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size,
    )


class _CallableModule(ModuleType):
    """Make the module callable as its function: importing it makes ``memprof.attach`` the module."""

    __call__ = staticmethod(attach)


sys.modules[__name__].__class__ = _CallableModule
