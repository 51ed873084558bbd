"""Log one round of a loop: what it took of the device and gave back, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

from memprof.simulate.recorder.flops import Tally


class LoggedAllocation(NamedTuple):
    """Keep one allocation: its bytes, and the stream, stack and tag it was made under."""

    nbytes: int
    stream: int
    captured: Any
    tag: str


class RoundLog:
    """Log the allocations and frees of one round, and its work.

    A step is an allocation, or the address of what is given back and its number, None where an earlier round took it.
    ``left`` has the number of each block in use by its address, ``given`` the addresses of others' blocks given back.
    ``only_device`` says that the round did nothing but take and give back.
    """

    def __init__(self) -> None:
        self.steps: list[LoggedAllocation | tuple[int, int | None]] = []
        self.sizes: list[int] = []  # of the allocations, in order
        self.left: dict[int, int] = {}
        self.given: list[int] = []
        self.only_device = True
        self.work = Tally()

    def born(self, address: int, nbytes: int, stream: int, captured: Any, tag: str) -> None:
        self.left[address] = len(self.sizes)
        self.sizes.append(nbytes)
        self.steps.append(LoggedAllocation(nbytes, stream, captured, tag))

    def freed(self, address: int) -> None:
        number = self.left.pop(address, None)
        if number is None:
            self.given.append(address)
        self.steps.append((address, number))
