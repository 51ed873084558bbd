"""Log one round of a loop: what it took of the device and gave back, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

from memprof.simulate.recorder.flops import Tally


class Born(NamedTuple):
    """Keep one allocation: its address and bytes, and the stack and tag it was made under."""

    address: int
    nbytes: int
    stream: int
    captured: Any
    tag: str


class RoundLog:
    """Log the allocations and frees of one round, and its work.

    ``only_device`` says that it did nothing but take and give back."""

    def __init__(self) -> None:
        self.steps: list[Born | int] = []
        self.only_device = True
        self.work = Tally()

    def born(self, address: int, nbytes: int, stream: int, captured: Any, tag: str) -> None:
        """Log an allocation at ``address``."""
        self.steps.append(Born(address, nbytes, stream, captured, tag))

    def freed(self, address: int) -> None:
        """Log a free."""
        self.steps.append(address)

    def sizes(self) -> list[int]:
        """List the bytes of the allocations, in order."""
        return [step.nbytes for step in self.steps if isinstance(step, Born)]

    def left(self) -> tuple[dict[int, int], list[int]]:
        """Return what the round kept, number -> address, and the addresses it gave back that were not its own."""
        mine: dict[int, int] = {}
        given: list[int] = []
        count = 0
        for step in self.steps:
            if isinstance(step, Born):
                mine[step.address] = count
                count += 1
            elif mine.pop(step, None) is None:
                given.append(step)
        return {number: address for address, number in sorted(mine.items(), key=lambda pair: pair[1])}, given
