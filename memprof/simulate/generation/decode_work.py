"""Count a whole generation's work from the few tokens that are executed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from memprof.simulate.recorder.flops import Tally
from memprof.simulate.recorder.session import FakeSession


class DecodeWork:
    """Count the prompts' forward once and each token after it as the first and the last one do on average.

    ``passes``: how many times all of it is done, for as many sequences each.
    """

    def __init__(self, session: FakeSession, tokens: int, passes: int) -> None:
        self._work = session.fake_recorder.work
        self._tokens, self._passes = tokens, passes

    @contextlib.contextmanager
    def first(self, *, alone: bool) -> Iterator[None]:
        """Watch the prompts' forward and the decoding of the token after it; ``alone``: the last are not executed."""
        with self._work.apart() as parts:
            yield
        self._count(parts[:_BEFORE], 1)
        self._count(parts[_BEFORE:], self._share() * (2 if alone else 1))

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """Watch the last two tokens."""
        with self._work.apart() as parts:
            yield
        self._count(parts, self._share() / 2)

    def of_runs(self, runs: Sequence[Sequence[Tally]]) -> None:
        """Count all from a first and a last run's parts: the prompts' forward, each token, what follows the last."""
        first, last = runs[0], runs[-1]
        self._count(list(first[:_BEFORE]), 1)
        decoded = [tally for parts, at in ((first, _BEFORE), (last, -2)) for tally in [parts[at]] if len(parts) > 3]
        self._count(decoded, self._share())

    def of_jumps(self, executed: Sequence[tuple[Tally, Tally]], times: int) -> None:
        """Count what ``times`` steps do more than others: of some of them, what they and the step before them do."""
        for jump, before in executed:
            self._count([jump], times / len(executed))
            self._count([before], -times / len(executed))

    def _share(self) -> float:
        return (self._tokens - 1) / 2

    def _count(self, parts: list[Tally], times: float) -> None:
        for part in parts:
            self._work.add(part, self._passes * times)


# transformers asks whether sequences are unfinished after the prompts' forward, and after every token's sampling: the
# forward, the first sampling; then the second token.
_BEFORE = 2
