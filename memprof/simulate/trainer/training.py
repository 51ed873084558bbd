"""Train for two steps on fake tensors: a warm-up step, then the one that is measured."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from typing import Any

from torch import nn

from memprof.config.model_shape import positions_of
from memprof.config.settings import Settings, TrainerSettings
from memprof.config.trainer_fields import unsimulated_of
from memprof.recording.guard import MethodPatcher
from memprof.recording.run_facts import plain_config
from memprof.recording.trainer_phases import TrainerPhases
from memprof.simulate.fake_cuda.images import shapes_unchecked
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.sharding.dtensors import shards_planned_unseen
from memprof.simulate.sharding.fsdp2 import gathered_owned
from memprof.simulate.sharding.zero import gathering_for_zero
from memprof.simulate.shortcut_switches import shortcut
from memprof.simulate.trainer.build import build_trainer
from memprof.simulate.trainer.checkpointing import offloading_to_host
from memprof.simulate.trainer.kv_caches import modelled_quanto
from memprof.simulate.trainer.recipes import liger_note
from memprof.simulate.trainer.trl_on_fakes import own_accelerate_state, quiet, trl_on_fakes
from memprof.vocabulary import Category, Phase

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # torch's defaults for DistributedDataParallel, in bytes
# Rows of a position table before its first position, in OPT's.
_OFFSETS = (0, 2)


def selected_of(settings: TrainerSettings) -> Any:
    """Count the positions of a boolean mask that are set: of ``[batch, tokens]`` masks the completions', else all."""

    def selected(shape: tuple[int, ...]) -> int:
        labelled = settings.trainer != "sft" and len(shape) == 2
        if labelled and shape[1] in (settings.sequence_length - 1, settings.sequence_length):
            return shape[0] * settings.completion_length
        return math.prod(shape)

    return selected


def run_trl(settings: Settings, config: Any, session: FakeSession, mesh: Any = None, *, by_name: bool = False) -> None:
    """Train a warm-up step, then the measured one; call it inside the fake world with tracking on.

    ``by_name``: as in :func:`memprof.simulate.trainer.build.build_trainer`.

    Raises:
        InputError: the model, or an option, cannot be simulated.
        OutOfMemory: the simulated device is full.
    """
    session.setup = {"model_config": plain_config(config)}
    session.notes += [field.sentence() for field in unsimulated_of(settings.known)]
    if settings.unknown:
        names = ", ".join(settings.unknown)
        session.notes.append(f"Not read, because no configuration of TRL, transformers or PEFT has them: {names}.")
    if settings.dtype != (taken := _trained_dtype(settings)) and "dtype" not in settings.assumed:
        session.notes.append(f"dtype {settings.dtype} is not taken: {settings.sharding} trains weights in {taken}.")
    if settings.recipe == "liger":
        session.notes.append(liger_note(settings, config))
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_accelerate_state())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-simulate-"))
        stack.enter_context(quiet())
        load = session.enter_phase(Phase.LOAD.value)
        stack.enter_context(trl_on_fakes(settings, config, session))
        stack.enter_context(modelled_quanto())
        if settings.images:
            stack.enter_context(shapes_unchecked())
        if not settings.lean and settings.checkpointing == "offloaded":  # the lean trainer has its own
            stack.enter_context(offloading_to_host(session))
        if mesh is not None:
            stack.enter_context(shards_planned_unseen(session.fake_recorder))
            if settings.sharding == "fsdp2":
                stack.enter_context(gathered_owned(session))
        trainer = build_trainer(settings, config, folder, session, mesh, by_name=by_name)
        session.notes += notes_on_length(trainer.model, settings.sequence_length)
        stack.enter_context(gathering_for_zero(getattr(trainer, "_memprof_zero", None)))
        if settings.gpus > 1 and settings.sharding == "ddp":
            _hold_buckets(trainer.model, session)
        if load is not None:
            session.exit_phase(load)
        if not session.growth and (micro_batches := shortcut("micro_batches")) is not None:
            stack.enter_context(micro_batches.middle_left_out(session.fake_recorder))
        stack.enter_context(watched(trainer, session))
        trainer.train()
        session.look_again()


def _hold_buckets(model: Any, session: FakeSession) -> None:
    """Hold DistributedDataParallel's flat copies of gradients from now on, as many buckets as torch would make."""
    sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
    filled, limit = 0, _FIRST_BUCKET
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            session.fake_recorder.blocks.hold(filled, Category.COMMUNICATION, "gradient bucket")
            filled, limit = 0, _BUCKET
    if filled:
        session.fake_recorder.blocks.hold(filled, Category.COMMUNICATION, "gradient bucket")


def _trained_dtype(settings: Settings) -> str:
    """Return the dtype of the weights that are trained: accelerate's own under FSDP2, DeepSpeed's under ZeRO."""
    accelerates = settings.sharding == "fsdp2" and not settings.has_adapter and settings.mixed_precision != "no"
    return "float32" if accelerates else settings.weights_dtype


def notes_on_length(model: Any, tokens: int) -> list[str]:
    """Say in a sentence that sequences of ``tokens`` are longer than the model's positions reach; else nothing."""
    reach = positions_of(model.config.get_text_config(decoder=True))
    if reach is None or tokens <= reach:
        return []
    told = f"Sequences of {tokens:,} tokens are longer than this model's positions reach ({reach:,} tokens)"
    if _has_table(model, reach):
        return [f"{told}: a real run ends in an index error, since each position has a row of its own."]
    return [f"{told}: memory is what a run of this length needs, and the model was not trained for it."]


def _has_table(model: Any, reach: int) -> bool:
    tokens = model.get_input_embeddings()
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    return any(table.num_embeddings - reach in _OFFSETS for table in tables)


@contextlib.contextmanager
def watched(trainer: Any, session: FakeSession) -> Iterator[None]:
    """Mark the phases and steps of a trainer's training in the session, and let it print nothing, while open."""
    from transformers import PrinterCallback, ProgressCallback

    seams = MethodPatcher(session.guard, lambda error: None)
    try:
        phases = TrainerPhases(trainer, seams)
        phases.current = session
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.add_callback(steps_callback(session, phases))
        yield
    finally:
        seams.restore()


def steps_callback(session: FakeSession, phases: TrainerPhases) -> Any:
    """Make the callback that tells the session which step it is, and ends the step's phases."""
    from transformers import TrainerCallback

    class StepCounter(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            session.set_step(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            phases.end_step()

    return StepCounter()
