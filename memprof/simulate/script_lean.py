"""A script's own lean trainer: told that it is on the simulated GPU, as the recipe ``lean`` is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from memprof.simulate.fakes import patched
from memprof.simulate.lean_patches import lean_on_cuda, reference_of
from memprof.simulate.lean_settings import not_kept

if TYPE_CHECKING:
    from memprof.simulate.session import FakeSession

__all__ = ["is_lean", "lean_arguments", "lean_world"]


def is_lean(trainer: Any) -> bool:
    """Whether a trainer is the lean one, or a subclass of it."""
    from memprof.grpo import LeanGRPOTrainer

    return isinstance(trainer, LeanGRPOTrainer)


@contextmanager
def lean_world(load: Callable[..., Any], session: FakeSession, device: str) -> Iterator[None]:
    """What the lean trainer asks of the machine, answered by the simulated one.

    ``load`` reads the reference's checkpoint; its arguments are ``create_model_from_path``'s.
    """
    cuda = device == "cuda"
    with (
        patched(*reference_of(load, session if cuda else None)),
        patched(*(lean_on_cuda(session) if cuda else ())),
    ):
        yield


def lean_arguments(given: Any, folder: str, notes: list[str]) -> Any:
    """The ``LeanGRPOConfig`` that the trainer would make of ``given``, without a search of its own."""
    from memprof.grpo import LeanGRPOConfig

    arguments = LeanGRPOConfig.of(given, folder)
    if arguments.memory_budget is not None:
        notes.append(
            f"memory_budget={arguments.memory_budget!r}: no settings were searched for; those that the script leaves "
            "open are at their defaults, so a real run may choose leaner ones (memprof simulate --recipe lean "
            "--memory-budget chooses as it does)"
        )
        arguments.memory_budget = None
    defaults = {f.name: f.default for f in fields(LeanGRPOConfig) if f.default is not MISSING}
    others = not_kept(vars(arguments), defaults)
    if others:
        notes.append(f"not among the settings kept, which have the trainer's defaults: {', '.join(others)}")
    return arguments
