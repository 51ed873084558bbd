"""``record``: watch any loop, write one snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.compat import missing, require
from memprof.config.gpus import capacity_bytes
from memprof.errors import InputError, UsageError, import_for
from memprof.recording import phases
from memprof.recording.guard import FailureGuard, read_foreign
from memprof.recording.recorder import Recorder
from memprof.recording.session import Session
from memprof.vocabulary import Kind

if TYPE_CHECKING:
    import torch

__all__ = ["capacity_bytes", "device_of", "make_recorder", "record", "switched_off"]


def make_recorder(
    device: torch.device | str | int | None,
    kind: str = "auto",
    *,
    max_entries: int | None = None,
    stacks: str | None = "python",
    capacity: int | str | None = None,
    hidden: Sequence[str] = (),
    reset_peaks: bool = True,
) -> Recorder:
    """Make the recorder for a device: CUDA's own history on CUDA and ROCm, the tensor trace elsewhere.

    Raises:
        UsageError: what is asked for cannot be, or torch lacks what the recorder needs.
    """
    import_for("memprof's recorders", "torch", {"torch": "record"})
    import torch

    while phases.STANDING_BY:
        phases.STANDING_BY.pop()()
    room = None if capacity is None else capacity_bytes(capacity)
    where = _device(device)
    if kind == "auto":
        kind = Kind.CUDA.value if where.type == "cuda" else Kind.TRACE.value
    if kind == Kind.CUDA.value:
        if where.type != "cuda" or not torch.cuda.is_available():
            raise UsageError(f"kind='cuda' needs a CUDA or ROCm device, and {where} is none; use kind='trace'.")
        require("record.cuda")
        from memprof.recording.cuda.history import CudaHistory

        recorder = CudaHistory(where, max_entries=max_entries, stacks=stacks, reset_peaks=reset_peaks, capacity=room)
        recorder.notes += missing("record.cuda")
        return recorder
    if kind == Kind.TRACE.value:
        require("record.trace")
        from memprof.recording.trace.tensor_trace import TensorTrace

        trace = TensorTrace(where, max_entries=max_entries, stacks=stacks, capacity=room, hidden=hidden)
        trace.notes += missing("record.trace")
        return trace
    raise UsageError(f"kind={kind!r} is not known; use 'auto', 'cuda' or 'trace'.")


@contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    reference_model: Any = None,
    reward_models: Any = (),
    value_model: Any = None,
    config: Mapping[str, Any] | None = None,
    device: torch.device | str | int | None = None,
    kind: str = "auto",
    max_entries: int | None = None,
    stacks: str | None = "python",
    capacity: int | str | None = None,
    reset_peaks: bool = True,
) -> Iterator[Session]:
    """Record what the code inside allocates and write it to ``path`` as a torch memory snapshot.

    It is written when the block ends, also after an exception. Mark what goes on inside with :func:`memprof.phase`.
    With ``MEMPROF=0`` in the environment nothing is recorded.

    Args:
        path: the snapshot to write (a pickle; PyTorch's viewers open it).
        model: the policy; adapters in it are told apart.
        optimizer: the one whose state is named; optimizers that step while recording are found without it.
        reference_model, reward_models, value_model: other models that hold memory (``reward_models``: one or several).
        config: facts about the run to keep with it, flat names and plain values.
        device: the device to watch; by default the model's, else CUDA's current one, else the CPU.
        kind: ``"cuda"`` (the allocator's history), ``"trace"`` (the tensor trace) or ``"auto"``.
        max_entries: how many of the newest entries to keep; None for all (CUDA: one million).
        stacks: ``"python"``, ``"all"`` for C++ frames too, or None.
        capacity: bytes (or a size such as ``"2GB"``) the device is to have: what needs more raises
            ``torch.OutOfMemoryError``. The tensor trace counts tensors; on CUDA torch's own limit for the process is
            set, and what it was before is restored when recording ends.
        reset_peaks: let per-phase peaks on CUDA be measured with ``reset_peak_memory_stats``; what your own code
            then reads from ``max_memory_allocated`` counts from the latest phase's start.

    Yields:
        The running session (its ``set_step`` marks optimizer steps).

    Raises:
        UsageError: arguments that cannot be satisfied.
        InputError: ``path`` is a folder, or its folder does not exist. Once the block runs, failures are warnings.
    """
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: it is a folder, or its folder does not exist.")
    recorder = make_recorder(
        device if device is not None else device_of(model),
        kind,
        max_entries=max_entries,
        stacks=stacks,
        capacity=capacity,
        reset_peaks=reset_peaks,
    )
    session = Session(recorder, config=config)
    models = {"policy": model, "reference": reference_model, "reward": reward_models, "value": value_model}
    for role, given in models.items():
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if one is not None:
                session.add_model(one, role)
    if optimizer is not None:
        session.owners.add_optimizer(optimizer)
    if switched_off():
        yield session
        return
    try:
        session.start()
    except Exception as error:
        session.guard.shut(error)
        yield session
        return
    try:
        yield session
    finally:
        write = [] if session.guard.forked else [lambda: session.write(target)]
        FailureGuard(lost=str(target)).run_all_cleanups(session.stop, *write)


def _device(device: torch.device | str | int | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, int):
        return torch.device("cuda", device)
    where = torch.device(device)
    unnumbered = str(where) == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if unnumbered and torch.cuda.is_available() else where


def device_of(model: Any) -> torch.device | None:
    """Return the device of a model's first parameter that is on one; None if there is none, or its code raises."""

    def find() -> torch.device | None:
        if model is not None and callable(getattr(model, "parameters", None)):
            return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), None)
        return None

    return read_foreign(find, None)


def switched_off() -> bool:
    """Tell whether ``MEMPROF=0`` is set."""
    return os.environ.get("MEMPROF", "").strip().lower() in ("0", "off", "false", "no")
