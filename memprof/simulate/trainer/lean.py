"""Run the lean trainer on fake tensors: tell it that they are on a GPU, and answer what it asks of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch

from memprof.compat import trl as trl_names
from memprof.compat.patching import replacing
from memprof.config.from_trainer import not_kept
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.pieces import Piece
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.shortcut_switches import shortcut
from memprof.vocabulary import Category

# Of the pieces a micro-batch is cut into, those executed: gradients are there from the second on. Where gradients are
# summed apart until the last piece, its sums are there in the second, and a last one closes them.
_PIECES = 2
_SUMMED_PIECES = 3

Change = tuple[Any, str, Any]


def is_lean(trainer: Any) -> bool:
    """Tell whether a trainer is the lean one, or of a subclass of it."""
    from memprof.grpo.trainer import LeanTrainer

    return isinstance(trainer, LeanTrainer)


def lean_arguments(given: Any, folder: str, notes: list[str], kind: str = "grpo") -> Any:
    """Make the lean config that the trainer would make of ``given``, without a search for a memory budget."""
    from memprof.grpo import LeanGRPOConfig, LeanRLOOConfig

    config: Any = LeanRLOOConfig if kind == "rloo" else LeanGRPOConfig
    arguments = config.of(given, folder)
    if arguments.memory_budget is not None:
        notes.append(
            f"memory_budget={arguments.memory_budget!r}: no settings were searched for; those that the script leaves "
            "open are at their defaults, so a real run may choose leaner ones (memprof simulate --recipe lean "
            "--memory-budget chooses as it does)"
        )
        arguments.memory_budget = None
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    others = not_kept(vars(arguments), defaults)
    if others:
        notes.append(f"not among the saved settings, so the trainer's defaults are used: {', '.join(others)}")
    return arguments


@contextlib.contextmanager
def lean_world(load: Callable[..., Any], session: FakeSession, device: str) -> Iterator[None]:
    """Answer what the lean trainer asks of the machine, while open.

    ``load`` reads the reference's checkpoint; its arguments are ``create_model_from_path``'s.
    """
    on_cuda = device == "cuda"
    with replacing(_reference_of(load, session if on_cuda else None), *(_lean_on_cuda(session) if on_cuda else ())):
        yield


def _lean_on_cuda(session: FakeSession) -> list[Change]:
    """List what makes the lean trainer run as on a GPU: Triton's passes, long sequences' defaults, pinned host memory,
    and as many sequences generating together as the simulated card has room for."""
    from memprof.grpo import device as machine
    from memprof.grpo.loss import chunked_loss
    from memprof.grpo.loss.passes import shape_passes
    from memprof.grpo.step import micro_batch, pieces, scoring
    from memprof.grpo.step.gradient_sums import are_summed
    from memprof.grpo.techniques import attention_kernels, offload, segment_attention

    def pinned(n_bytes: int, pin: bool) -> Any:
        with session.fake_recorder.work.apart():
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)  # what crosses is counted at each crossing

    def few(step: StepContext, *given: Any, **how: Any) -> Any:
        """Plan the first pieces only: they are alike here, and the rest repeats them."""
        planned = plan(step, *given, **how)
        wanted, sharded = step.settings.gradient_sums, step.ranks.forward_together
        summed = are_summed(wanted, step.policy, len(planned), sharded=sharded)
        most = _SUMMED_PIECES if summed else _PIECES
        done = planned if any(piece.prompt is not None for piece in planned) else planned[:most]
        session.fake_recorder.work.pieces = _tokens(planned) / max(1, _tokens(done))
        return done

    plan = pieces.plan
    return [
        (chunked_loss, "passes_for", lambda device: shape_passes()),
        (machine, "device_kind", lambda device: "cuda"),
        (machine, "free_bytes", lambda device: _free_bytes(session)),
        (offload, "host_memory", pinned),
        (segment_attention, "attention_kernel", attention_kernels.gpu_kernel),
        (micro_batch, "plan", few),
        (scoring, "plan", few),
        _passes_counted(session),
        _crossings_counted(session),
        _steps_on_host(session),
        *_rounds_repeated(session),
    ]


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(row.length for piece in pieces for row in piece.rows)


def _reference_of(load: Callable[..., Any], session: FakeSession | None) -> Change:
    """Replace what the lean trainer's own ``load_reference`` reads a checkpoint with; ``session``: into host memory."""

    def on_host(*args: Any, **kwargs: Any) -> Any:
        if session is None:
            return load(*args, **kwargs)
        with session.fake_recorder.storages.unseen():
            model = load(*args, **kwargs)
        session.host_bytes += sum(p.numel() * p.element_size() for p in model.parameters())
        for tensor in (*model.parameters(), *model.buffers()):
            session.fake_recorder.storages.disown(tensor)
        return model

    return (*trl_names.CREATE_REFERENCE.place(), on_host)


_UNKNOWN = 1 << 62  # of a card that was not named: room for all


def _free_bytes(session: FakeSession) -> int:
    """Count what torch could still get on the simulated card: all that is not outside torch and not in use."""
    total = session.fake_recorder.device().total_bytes
    if total is None:
        return _UNKNOWN
    return max(0, total - (session.non_torch or 0) - session.fake_recorder.allocator.allocated)


def _rounds_repeated(session: FakeSession) -> list[Change]:
    """Execute only a few of an MLP's tiles and the head's chunks, which are alike but for the last."""
    from memprof.grpo.loss import chunked_loss
    from memprof.grpo.rows import parts_of
    from memprof.grpo.techniques import tiled_mlp

    def parts(total: int, size: int) -> Iterator[slice]:
        found, rounds = list(parts_of(total, size)), shortcut("rounds")
        return iter(found) if rounds is None else rounds.identical_iterations(session.fake_recorder, found)

    return [(tiled_mlp, "parts_of", parts), (chunked_loss, "parts_of", parts)]


def _crossings_counted(session: FakeSession) -> Change:
    """Count the bytes of a layer's input that goes to host memory, and comes back in backward."""
    from memprof.grpo.techniques.offload import Offloader

    park = Offloader._park

    def parked(self: Any, tensor: torch.Tensor, layer: int) -> Any:
        session.fake_recorder.work.to_host(2 * tensor.numel() * tensor.element_size())
        return park(self, tensor, layer)

    return (Offloader, "_park", parked)


def _steps_on_host(session: FakeSession) -> Change:
    """Keep the counts of steps of the optimizer that rounds stochastically off the device, as on a GPU."""
    from memprof.grpo.techniques import rounding

    count = rounding._no_steps

    def on_host() -> torch.Tensor:
        with session.fake_recorder.storages.unseen():
            steps = count()
        session.fake_recorder.storages.disown(steps)
        return steps

    return (rounding, "_no_steps", on_host)


def _passes_counted(session: FakeSession) -> Change:
    """Count what of the reference's weights, which are the host's, passes over the device."""
    from memprof.grpo.reference import HostReference

    passes_over = HostReference._here

    @contextlib.contextmanager
    def here(self: Any, tensors: Any, copies: Any = None) -> Iterator[None]:
        tensors = list(tensors)
        session.fake_recorder.work.to_host(sum(t.numel() * t.element_size() for t in tensors))
        with passes_over(self, tensors, copies):
            for tensor in tensors:
                session.book.claim(tensor, Category.REFERENCE_MODEL, "streamed", None)
            yield

    return (HostReference, "_here", here)
