"""Make sessions as a trainer needs them: which recorder, who is who, how it generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memprof.integrations.callback.options import Options
from memprof.integrations.callback.schedule import Cycle

from memprof.compat.trl import ITERATIONS, MICRO_STEP
from memprof.recording.api import make_recorder
from memprof.recording.guard import FailureGuard
from memprof.recording.run_facts import collect_facts, collect_setup
from memprof.recording.session import Session
from memprof.recording.system.inference_engine import engine_of, server_note
from memprof.vocabulary import Kind, Phase

_HERE = str(Path(__file__).resolve().parents[1]) + "/"
# Entries a tensor trace keeps when it runs all along: about one step of a small model's GRPO.
_RING = 200_000


def uses_cuda(trainer: Any, options: Options) -> bool:
    """Tell whether this trainer's memory is recorded by CUDA's history."""
    return options.kind == Kind.CUDA.value or (options.kind == "auto" and trainer.args.device.type == "cuda")


def runs_always(trainer: Any, options: Options) -> bool:
    """Tell whether one session runs all along, instead of one for each recording."""
    return uses_cuda(trainer, options) or options.capacity is not None


def new_session(trainer: Any, options: Options, guard: FailureGuard) -> Session:
    """Return a session for a trainer's device, not started."""
    ring = _RING if runs_always(trainer, options) and not uses_cuda(trainer, options) else None
    recorder = make_recorder(
        trainer.args.device,
        options.kind,
        max_entries=options.max_entries or ring,
        stacks=options.stacks,
        capacity=options.capacity,
        hidden=[_HERE],
        reset_peaks=options.reset_peaks,
    )
    accelerator = trainer.accelerator
    return Session(
        recorder,
        rank=int(getattr(accelerator, "process_index", 0)),
        world_size=int(getattr(accelerator, "num_processes", 1)),
        guard=guard,
        redact=options.redact,
    )


def load_session(trainer: Any, options: Options, guard: FailureGuard) -> Session:
    """Return a CUDA session that begins while the trainer is being built, in phase ``load``."""
    session = new_session(trainer, options, guard)
    session.add_model(trainer.model, "policy")
    session.start()
    session.enter_phase(Phase.LOAD.value)
    return session


def introduce(session: Session, trainer: Any, options: Options) -> None:
    """Tell a session about the trainer's models, optimizer and settings."""
    session.config = collect_facts(trainer, options.redact)
    session.setup = collect_setup(trainer)
    session.add_model(trainer.model, "policy")
    session.owners.add_wrapper(getattr(trainer, "model_wrapped", None))
    for attribute, role in (("ref_model", "reference"), ("teacher_model", "reference"), ("value_model", "value")):
        if hasattr(other := getattr(trainer, attribute, None), "named_parameters"):
            session.add_model(other, role)
    for function in getattr(trainer, "reward_funcs", None) or []:
        if hasattr(function, "named_parameters"):
            session.add_model(function, "reward")
    session.owners.add_inference_engine(engine_of(trainer))
    if (note := server_note(trainer, options.redact)) is not None and note not in session.notes:
        session.notes.append(note)
    if getattr(trainer, "optimizer", None) is not None:
        session.owners.add_optimizer(trainer.optimizer)


def cycle_of(trainer: Any) -> tuple[Cycle, int]:
    """Return how the trainer generates, and the number of the micro-batch that comes next."""
    args = trainer.args
    accumulation = int(args.gradient_accumulation_steps)
    per_generation = getattr(args, "steps_per_generation", None)
    micro = MICRO_STEP.of(trainer)
    if per_generation is None or micro is None:
        return Cycle(1, 1), 0
    return Cycle(int(per_generation) * int(ITERATIONS.of(trainer, 1)), accumulation), int(micro)
