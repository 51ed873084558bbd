"""Write each distinct list of frames in a pickle once, before anything is built from it.

torch writes a new list of frames for every allocation: in a recording of a million events most of the bytes, and most
of the objects, are lists that say the same. Two lists whose bytes are the same references to frames are the same
stack. So every such list after ``"frames":`` becomes a number, and the distinct lists follow once, behind the snapshot.

The opcode check reads what is written here, not the file: nothing runs that was not checked. A list that defines a
frame of its own (the first to hold it) stays where it is.
"""

from __future__ import annotations

import pickletools
import re

_NAME = b"\x8c\x06frames\x94"
_FARTHEST = 1 << 16  # the name stands near the beginning: segments come first
_LIST, _END, _STOP = b"]\x94(", b"e", b"."
# References to objects seen before, by short and long number, and the list's end.
# Each byte string matches in one way only, so a list that goes on otherwise is given up in linear time.
_REFERENCES = re.compile(rb"(?:j...\0|h.)+e", re.DOTALL)
_LONGEST = 4096  # bytes of a list that is looked for by its end alone


def share_stacks(data: bytes) -> tuple[bytes, int] | None:
    """Return a pickle of ``(snapshot, lists of frames)``, and how many lists there are; None where none can be shared.

    In the snapshot each list that is shared is its position among the lists. The first is empty: no position is 0,
    which would read as no list.

    Args:
        data: a pickle of protocol 4 or 5 without frame opcodes, not checked yet.
    """
    name = _reference_to_name(data)
    if name is None or not data.endswith(_STOP):
        return None
    marker = name + _LIST
    numbers: dict[bytes, int] = {}
    out = bytearray()
    done, ending, at = 0, _END, data.find(marker)
    while at >= 0:
        begin = at + len(marker)
        end = data.find(ending, begin, begin + _LONGEST)
        number = numbers.get(data[begin:end]) if end >= 0 else None
        if number is None:
            match = _REFERENCES.match(data, begin)
            if match is None:
                at = data.find(marker, begin)
                continue
            end = match.end() - 1
            number = numbers.setdefault(data[begin:end], len(numbers) + 1)
            ending = data[end : end + 5]  # what follows a list is mostly the same
        out += data[done : begin - len(_LIST)]
        out += b"J%b\x94" % number.to_bytes(4, "little")  # remembered, as the list was: later numbers stay right
        done = end + 1
        at = data.find(marker, done)
    if not numbers:
        return None
    out += data[done:-1]
    out += b"](]" + b"".join([b"](" + references + _END for references in numbers]) + _END + b"\x86" + _STOP
    return bytes(out), len(numbers) + 1


def _reference_to_name(data: bytes) -> bytes | None:
    """Return the opcode that fetches the key ``"frames"``; None where the key does not stand near the beginning."""
    if data[:1] != b"\x80" or data[1:2] not in (b"\x04", b"\x05"):
        return None
    there = data.find(_NAME, 0, _FARTHEST)
    if there < 0:
        return None
    remembered = 0
    try:
        for opcode, _, position in pickletools.genops(data[: there + len(_NAME)] + _STOP):
            if position == there:
                return b"h%c" % remembered if remembered < 256 else b"j" + remembered.to_bytes(4, "little")
            remembered += opcode.name == "MEMOIZE"
    except ValueError:  # damaged; whoever reads the whole says so
        return None
    return None
