"""Go on after a piece has run out of device memory, with the gradient of the step that had room.

A backward that ends half-way has added to the gradients of some parameters and not of others. The gradients' tensors
show which: autograd adds to each once, in place. The piece runs again from the random state it began with and leaves
those parameters out of the graph, so that no copy of gradients is needed. It runs first as it was, with the cache given
back; then in halves, then with its layers checkpointed harder, then with the optimizer's state in host memory. A shared
prompt's keys and values are leaves beside the parameters.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memprof.grpo.once_log import OnceLog
from memprof.grpo.rows import longest
from memprof.grpo.step.pieces import Piece
from memprof.grpo.step.random_state import RandomState
from memprof.grpo.techniques.shared_prefix import SharedPrefix

#: ``sums``: where gradients of parameters are added up instead of in ``.grad``.
Sums = Mapping[torch.Tensor, torch.Tensor]

_OURS = "The lean trainer ran out of memory"
_LIBRARIES = ("/memprof/", "/trl/", "/transformers/", "/accelerate/")


@dataclass
class Adaptation:
    """Hold what a run has changed since memory ran out, and choose what to change next; ``log`` is told each change.

    ``give_back`` empties the device's cache. ``reduce_memory`` checkpoints more of the layers, for a piece of so
    many tokens, and returns how, or None. ``park`` moves the optimizer's state to host memory; False where it
    cannot. ``most_tokens``: of a piece of several rows, since larger ones have run out. ``again``: pieces that were
    run again.
    """

    log: OnceLog
    give_back: Callable[[], Any]
    reduce_memory: Callable[[int], str | None]
    park: Callable[[], bool] = lambda: False
    most_tokens: int | None = None
    again: int = 0

    def limit(self, tokens: int) -> int:
        """Return how many tokens a piece of several rows has now, of those it would have."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)

    def recall(self, kept: dict[str, Any]) -> None:
        """Keep the smaller limit of this run and of ``kept``, which goes into checkpoints, in both."""
        found = [size for size in (self.most_tokens, kept.get("most_tokens")) if size is not None]
        self.most_tokens = kept["most_tokens"] = min(found, default=None)

    def clear(self) -> None:
        """Free what the failed piece has left."""
        gc.collect()
        self.give_back()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory of the device has run out: torch's, or the workspace of one of its libraries."""
    return isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


def say_where(error: BaseException) -> None:
    """Add to an error that ends training in which function memory ran out, where no sentence of ours says it."""
    said = str(error)
    if not is_out_of_memory(error) or "The lean trainer " in said:
        return
    frames = traceback.extract_tb(error.__traceback__)
    names = [frame.name for frame in frames if any(part in frame.filename for part in _LIBRARIES)]
    error.args = (
        f"{said}\n{_OURS} outside its chunks and generation, in {names[-1] if names else 'the step'}, where "
        "on_oom='adapt' can't help: permanently allocated memory leaves too little.",
    )


@dataclass
class _Attempt:
    """One run of a piece. ``without``: parameters that have had their gradient of these rows."""

    piece: Piece
    without: frozenset[torch.Tensor] = frozenset()
    again: bool = False


def retry_on_oom(
    piece: Piece,
    run: Callable[[Piece], None],
    parameters: Sequence[torch.Tensor],
    sums: Sums,
    adaptation: Adaptation,
    device: torch.device,
    *,
    splits: Callable[[], bool],
) -> None:
    """Run ``piece`` forward and backward, smaller if it must be; ``run`` runs a piece with the rows it is given.

    ``parameters`` are those that are trained, ``device`` has its random state set back, ``splits`` is asked, where it
    matters, whether halves of a piece have the gradient of the whole.

    Raises:
        torch.OutOfMemoryError: there is nothing smaller, or it would have another gradient.
    """
    waiting = [_Attempt(piece)]
    while waiting:
        attempt = waiting.pop()
        prompt = attempt.piece.prompt
        state, made = RandomState.now(device), prompt.prefix if prompt else None
        marks = _marks(parameters, sums, made)
        said = None
        try:
            with _left_out(attempt.without):
                run(attempt.piece)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error)  # and nothing else of it: its frames hold the graph
        if said is None:
            continue
        drew = not RandomState.now(device).equals(state)
        now = _marks(parameters, sums, prompt.prefix if prompt else None)
        without = attempt.without.union(one for one, mark in now.items() if mark != marks.get(one, _UNTOUCHED))
        adaptation.clear()
        if prompt and prompt.ran and prompt.prefix is not made:
            prompt.ran.restore()  # the prompt stays, so the completions begin after it
        else:
            state.restore()
        waiting += _instead(attempt, without, adaptation, said, splits=not drew and splits())


def _instead(
    attempt: _Attempt, without: frozenset[torch.Tensor], adaptation: Adaptation, said: str, *, splits: bool
) -> Iterable[_Attempt]:
    """Choose what runs in place of an attempt that has failed; the last is run first."""
    piece, rows = attempt.piece, list(attempt.piece.rows)
    tokens = longest(rows or (piece.prompt.rows if piece.prompt else ()))
    adaptation.again += 1
    if not attempt.again:
        adaptation.log.warn("out of memory in a chunk: the cache was emptied, and the chunk runs again")
        return [_Attempt(piece, without, again=True)]
    if len(rows) > 1 and splits:
        half = -(-len(rows) // 2)
        width = max(row.completion if piece.prompt else row.length for row in rows)
        adaptation.most_tokens = adaptation.limit(half * width)
        adaptation.log.warn(
            f"out of memory in a chunk of {len(rows)} rows: it runs in halves, and chunks of several rows have at most "
            f"{adaptation.most_tokens} tokens from here on (max_tokens_per_piece={adaptation.most_tokens} spares the "
            "failed attempt)"
        )
        parts = [rows[half:], rows[:half]]
        return [_Attempt(Piece(part, piece.prompt), without, again=True) for part in parts]
    if (kind := adaptation.reduce_memory(tokens * max(1, len(rows)))) is not None:
        adaptation.log.warn(f"out of memory in a chunk that cannot be halved: {kind} from here on, and it runs again")
        return [_Attempt(piece, without, again=True)]
    if adaptation.park():
        adaptation.clear()
        adaptation.log.warn(
            "out of memory in a chunk that cannot be smaller: the optimizer's state stays in host memory from here on, "
            "and passes over the device one parameter at a time in every step (optim='adamw_8bit' has a quarter of it)"
        )
        return [_Attempt(piece, without, again=True)]
    if len(rows) > 1:
        why = "that has dropout, whose halves would draw others, or a router's loss over it alone"
        raise end(said, f"in a chunk {why}: set a smaller max_tokens_per_piece")
    least = f"in a chunk of one sequence of {tokens} tokens, the smallest that can be trained"
    raise end(said, f"{least}: shorten max_completion_length, or use a larger GPU")


def end(said: str, where: str) -> torch.OutOfMemoryError:
    """Return the error that ends training: what the allocator ``said``, and ``where`` it was and what to do."""
    return torch.OutOfMemoryError(f"{said}\n{_OURS} {where}.")


def _marks(
    parameters: Iterable[torch.Tensor], sums: Sums, prefix: SharedPrefix | None
) -> dict[torch.Tensor, tuple[Any, ...]]:
    """Return, by parameter and by leaf of a shared prompt, what changes when a gradient is added to it."""
    found = {parameter: (parameter.grad, sums.get(parameter)) for parameter in parameters}
    found |= prefix.gradients() if prefix is not None else {}
    return {one: tuple(g if g is None else (id(g), g._version) for g in pair) for one, pair in found.items()}


#: Of a leaf that was made since.
_UNTOUCHED = (None, None)


@contextmanager
def _left_out(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
