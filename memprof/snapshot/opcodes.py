"""Check a pickle's opcodes before anything is built from them.

A snapshot needs only a few opcodes: dicts, lists, strings, numbers and pairs of small numbers. All others
are refused. That keeps out pickles that run code (globals, objects), that take far more memory than the
file is large (wrong memo indices or lengths, huge numbers), and that keep Python busy or crash it (nested
tuples as dict keys). One regular expression skips runs of harmless opcodes at about 150 MB a second; each
of its alternatives is one or more whole opcodes.
"""

from __future__ import annotations

import re
from functools import cache

from memprof.errors import InputError, UnsafePickle

_RUN = 1000  # opcodes per match: the regular expression engine remembers each until the match ends
_ODD_TUPLES = 12  # tuples other than pairs of numbers; nested, they cost at most 3 ** 12 steps

_GLOBALS = {
    ord("c"): "a global",
    ord("i"): "an object",
    0x93: "a global",
    0x82: "an extension",
    0x83: "an extension",
    0x84: "an extension",
    ord("P"): "a persistent id",
    ord("Q"): "a persistent id",
}
_OBJECTS = {ord("R"), ord("b"), ord("o"), 0x81, 0x92}
_LENGTHS = {ord("X"): 4, 0x8D: 8}  # text and long text: a length of this many bytes follows
_FRAME = 0x95


@cache
def _harmless() -> re.Pattern[bytes]:
    """Compile the pattern of one or more harmless opcodes, when first needed: it takes a few milliseconds."""

    def sized(sizes: tuple[int, ...] | range) -> bytes:
        return b"(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in sizes) + b")"

    integer = rb"(?:K.|M..)"
    pair = rb"(?:" + integer + rb"\x86)?"
    number = rb"J.{4}|M.." + pair + rb"|K." + pair  # a number, or a pair of small ones (a pool's id)
    long_ = rb"\x8a" + sized((6, 7, 5, 8, 4, 3, 2, 1, 0, 9))
    text = rb"\x8c" + sized(range(256))
    value = rb"h.|" + long_ + rb"|j.{4}|" + number + rb"|" + text
    opcode = (
        # Most of a large file is lists of frames, each a reference to a frame seen before.
        rb"(?:" + rb"j...\0" * 4 + rb"|"
        rb"h.(?:" + value + rb")|j.{4}(?:" + value + rb")|u\}\x94\(|[}\]ueasNdl01)\x88\x89\x94]|"
        rb"\((?:" + integer + integer + rb"t)?|" + value + rb"|q.|r..[\x00-\x0f]\x00|G.{8})"
    )
    return re.compile(opcode + b"{1,%d}" % _RUN, re.DOTALL)


def without_frames(data: bytes, name: str) -> bytes:
    """Return a pickle without its frame opcodes, so that the unpickler runs exactly the opcodes checked here.

    A frame only tells how many bytes to fetch at once. Where an opcode straddles a frame's end, Python's C
    unpickler loses bytes and continues elsewhere. It would then run opcodes that were not checked.

    Raises:
        InputError: a frame is longer than the file.
    """
    if data[:1] != b"\x80" or data[2:3] != b"\x95":
        return data
    view, parts, position = memoryview(data), [data[:2]], 2
    while position < len(data):
        opcode = data[position]
        if opcode == _FRAME:
            begin, keep = position + 9, position + 9
        elif opcode in _LENGTHS:  # a long text stands between frames
            begin, keep = position + 1 + _LENGTHS[opcode], position
        else:
            break
        end = begin + int.from_bytes(data[position + 1 : begin], "little")
        if end > len(data):
            raise InputError(f"{name}: the pickle ends too early; copy the file again or record a new one.")
        parts.append(view[keep:end])  # type: ignore[arg-type]  # join takes views too
        position = end
    parts.append(view[position:])  # type: ignore[arg-type]
    return b"".join(parts)


def check_opcodes(data: bytes, name: str) -> int:
    """Accept a pickle of plain data, without frames, whose size in memory is in proportion to its file size.

    Returns the position behind its last opcode.

    Raises:
        UnsafePickle: it names a global, an object or a persistent id.
        InputError: it is damaged, or holds opcodes that no snapshot has.
    """
    if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise InputError(f"{name}: {_what_instead(data)}; expected what torch.cuda.memory._dump_snapshot writes.")
    # The bytes "}" and "]" bound the number of dicts and lists, which take 60 to 240 bytes of memory each.
    # A genuine dict has several entries, so it takes at least 16 bytes of the file.
    if data.count(b"}") + data.count(b"]") > len(data) // 10 + 4096:
        raise InputError(f"{name}: not a memory snapshot (little but empty containers in it).")
    match = _harmless().match
    position, odd_tuples = 2, 0
    while True:
        run = match(data, position)
        if run is not None:
            position = run.end()
            continue
        if position >= len(data):
            raise InputError(f"{name}: the pickle ends too early; copy the file again or record a new one.")
        opcode = data[position]
        if opcode == ord("."):
            return position + 1
        if 0x85 <= opcode <= 0x87 and odd_tuples < _ODD_TUPLES:
            odd_tuples += 1
            position += 1
            continue
        position = _special(data, position, name)


def _special(data: bytes, position: int, name: str) -> int:
    """Return where the opcode after the one at ``position`` begins; raise for a refused one."""
    opcode = data[position]
    if opcode in _LENGTHS:
        width = _LENGTHS[opcode]
        begin = position + 1 + width
        length = int.from_bytes(data[position + 1 : begin], "little")
        if begin + length > len(data):
            raise InputError(f"{name}: the pickle ends too early; copy the file again or record a new one.")
        return begin + length
    if opcode == ord("r") and int.from_bytes(data[position + 1 : position + 5], "little") < len(data):
        return position + 5
    if opcode in _GLOBALS or opcode in _OBJECTS:
        raise UnsafePickle(
            f"{name}: not read, because this pickle would load {_named(data, position)}; a memory snapshot "
            "never does. Do not open it with other tools."
        )
    reason = "nested tuples" if opcode in (0x85, 0x86, 0x87, ord("t")) else f"pickle opcode 0x{opcode:02x}"
    if opcode not in _KNOWN:
        raise InputError(f"{name}: damaged, or not a pickle ({reason} at byte {position}); copy the file again.")
    raise InputError(f"{name}: not a memory snapshot ({reason} at byte {position}).")


# All opcodes of Python's pickle. One of these does not belong in a snapshot; any other byte is damage.
_KNOWN = frozenset(b"(.01234ILFSTUVGdegijpstBC") | {*range(0x80, 0x99)}

_TEXT = rb"(?:\x8c.|X.{4})([\w.]{1,120})(?:\x94|q.|r.{4})?"
_STACK_GLOBAL = re.compile(_TEXT + _TEXT + rb"\x93$", re.DOTALL)
_GLOBAL = re.compile(rb"[ci]([^\n]{1,120})\n([^\n]{1,120})\n", re.DOTALL)


def _named(data: bytes, position: int) -> str:
    """Name the global an opcode asks for, as ``module.name`` where it can be read."""
    opcode = data[position]
    match = _GLOBAL.match(data, position) or _STACK_GLOBAL.search(data[max(position - 500, 0) : position + 1])
    if match is not None:
        text = b".".join(match.groups()).decode("utf-8", "replace")
        return "".join(c if c.isprintable() else "\ufffd" for c in text)
    return _GLOBALS.get(opcode, "an object")


def _what_instead(data: bytes) -> str:
    """Tell in words what a file that is not a pickle seems to be."""
    start = data[:512].lstrip()[:64].lower()
    if start.startswith(b"pk\x03\x04"):
        return "a zip archive (perhaps a checkpoint), not a memory snapshot"
    if start.startswith((b"<!doctype", b"<html", b"<!--")):
        return "an HTML page, not a memory snapshot; give the pickle that it shows"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it stands for; fetch it with git lfs pull"
    if b"\0" in data[:512]:
        return "not a pickle"
    try:
        data[:512].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < 500:
            return "not a pickle"
    return "a text file, not a memory snapshot"
