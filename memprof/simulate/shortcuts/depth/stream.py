"""Write a logged run as a stream of tokens that do not depend on the number of layers, and align two streams."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from difflib import SequenceMatcher
from typing import NamedTuple

from memprof.simulate.shortcuts.depth.program import Call, Entry, Frames, OwnerAssignment, ProgramAllocation

_LAYER = re.compile(r"(?<=\blayers\.)\d+|(?<=\bh\.)\d+|(?<=\bblocks\.)\d+")
_DIGITS = re.compile(r"\d+")
#: Tokens of a gap between two anchors, of one stream times the other's, that are compared.
_LARGEST_GAP = 4_000_000
_NO_LAYER = -1


class NotAffine(Exception):
    """A deep model does not follow from these; the message says why."""


class Token(NamedTuple):
    """One entry of a program: what it is (``key``, see :class:`Keys`) and of which layer. ``pool`` is where its block
    is looked for: among all of its key, or among those without an owner; ``oldest`` and ``newest``: how many older
    and newer ones are there."""

    key: int
    layer: int
    pool: int = 0
    oldest: int = 0
    newest: int = 0


class AllocationKey(NamedTuple):
    """What allocations of different layers have in common: ``tag`` lacks the layer's number."""

    nbytes: int
    stream: int
    tag: str
    stack: int


class FreeKey(NamedTuple):
    """A free of an allocation with the key ``of``."""

    of: int


class ClaimKey(NamedTuple):
    """An owner of an allocation with the key ``of``; ``name`` lacks the layer's number."""

    of: int
    category: str
    detail: str | None
    name: str | None


Key = AllocationKey | FreeKey | ClaimKey | Call


class Keys:
    """Number the keys and the stacks of several streams."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.stacks: list[Frames | None] = []
        self._numbers: dict[Key, int] = {}
        self._stacks: dict[Hashable, int] = {}
        self._tags: dict[str, tuple[str, int]] = {}

    def number(self, key: Key) -> int:
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return found

    def stack(self, frames: Frames | None) -> int:
        known = None if frames is None else tuple((f["filename"], f["line"], f["name"]) for f in frames)
        found = self._stacks.get(known)
        if found is None:
            found = self._stacks[known] = len(self.stacks)
            self.stacks.append(frames)
        return found

    def split(self, text: str) -> tuple[str, int]:
        """Return a tag or a name without the layer's number, and that number."""
        found = self._tags.get(text)
        if found is None:
            numbers = _LAYER.findall(text)
            one = len(numbers) == 1
            found = (_LAYER.sub("*", text), int(numbers[0])) if one else (text, _NO_LAYER)
            self._tags[text] = found
        return found


def with_layer(text: str, layer: int) -> str:
    """Return a tag or a name with its layer's number."""
    return text if layer == _NO_LAYER else text.replace("*", str(layer), 1)


class Live:
    """Know the blocks in use by their key, and which of them have no owner yet."""

    def __init__(self) -> None:
        self.pools: tuple[dict[int, list[int]], dict[int, list[int]]] = (defaultdict(list), defaultdict(list))
        self.key_of: list[int] = []

    def add(self, key: int) -> None:
        for pool in self.pools:
            pool[key].append(len(self.key_of))
        self.key_of.append(key)

    def find(self, number: int, pool: int) -> tuple[int, int]:
        """Return how many blocks of this one's key are older and newer."""
        numbers = self.pools[pool][self.key_of[number]]
        place = bisect_left(numbers, number)
        return place, len(numbers) - 1 - place

    def remove(self, number: int, pool: int) -> bool:
        """Take a block out of a pool; tell whether it was there."""
        numbers = self.pools[pool][self.key_of[number]]
        place = bisect_left(numbers, number)
        if place == len(numbers) or numbers[place] != number:
            return False
        del numbers[place]
        return True


def stream_of(entries: Sequence[Entry], stacks: Sequence[Frames | None], keys: Keys) -> list[Token]:
    """Write a program as tokens; ``stacks`` are those of its allocations, in order. Frees that follow one another are
    in the order of their allocations, the newest first: their own order changes nothing and may be a hash's."""
    live, tokens = Live(), []
    known: dict[int, int] = {}
    frees: list[int] = []

    def flush() -> None:
        for number in sorted(frees, reverse=True):
            oldest, newest = live.find(number, 0)
            tokens.append(Token(keys.number(FreeKey(live.key_of[number])), _NO_LAYER, 0, oldest, newest))
            live.remove(number, 0)
            live.remove(number, 1)
        frees.clear()

    for entry in entries:
        if isinstance(entry, ProgramAllocation):
            flush()
            frames = stacks[len(live.key_of)]
            stack = known.get(id(frames))
            if stack is None:
                stack = known[id(frames)] = keys.stack(frames)
            tag, layer = keys.split(entry.tag)
            key = keys.number(AllocationKey(entry.nbytes, entry.stream, tag, stack))
            live.add(key)
            tokens.append(Token(key, layer))
        elif isinstance(entry, OwnerAssignment):
            flush()
            name, layer = (None, _NO_LAYER) if entry.name is None else keys.split(entry.name)
            key = keys.number(ClaimKey(live.key_of[entry.number], entry.category, entry.detail, name))
            numbers = live.pools[1][live.key_of[entry.number]]
            place = bisect_left(numbers, entry.number)
            pool = int(place < len(numbers) and numbers[place] == entry.number)
            tokens.append(Token(key, layer, pool, *live.find(entry.number, pool)))
            live.remove(entry.number, 1)
        elif isinstance(entry, Call):
            flush()
            tokens.append(Token(keys.number(entry), _NO_LAYER))
        else:
            frees.append(entry.number)
    flush()
    return tokens


def aligned(a: Sequence[Token], b: Sequence[Token], keys: Keys, last: tuple[int, int]) -> list[tuple[int, int]]:
    """Pair the tokens of ``a`` with those of the longer ``b``; what ``b`` alone has is paired with -1. What occurs at
    one depth only is compared without its numbers: its size may depend on the depth. ``last``: the number of each
    one's last layer. These two are paired, so that layers are added before the last one.

    Raises:
        NotAffine: they cannot be aligned.
    """
    pairs: list[tuple[int, int]] = []
    both = {token.key for token in a} & {token.key for token in b}
    a, b = ([t if t.key in both else t._replace(key=_loose(t.key, keys)) for t in tokens] for tokens in (a, b))
    anchoring = {number for number, key in enumerate(keys.keys) if isinstance(key, (AllocationKey, ClaimKey))}
    starts_a, starts_b = _calls(a, keys), _calls(b, keys)
    if [a[i].key for i in starts_a] != [b[j].key for j in starts_b]:
        raise NotAffine("the phases are not the same")
    before_a = before_b = 0
    for i, j in zip([*starts_a, len(a)], [*starts_b, len(b)], strict=True):
        anchors = [*_anchors(a, b, range(before_a, i), range(before_b, j), anchoring, last), (i, j)]
        for x, y in anchors:
            pairs += _gap(a, b, range(before_a, x), range(before_b, y))
            if x < len(a):
                pairs.append((x, y))
            before_a, before_b = x + 1, y + 1
    return pairs


def _loose(number: int, keys: Keys) -> int:
    """Return the key without its numbers."""
    key = keys.keys[number]
    if isinstance(key, Call):
        return number
    if isinstance(key, AllocationKey):
        return keys.number(key._replace(nbytes=-1, tag=_DIGITS.sub("#", key.tag)))
    return keys.number(key._replace(of=_loose(key.of, keys)))


def _calls(tokens: Sequence[Token], keys: Keys) -> list[int]:
    return [i for i, token in enumerate(tokens) if isinstance(keys.keys[token.key], Call)]


def _anchors(
    a: Sequence[Token], b: Sequence[Token], of_a: range, of_b: range, anchoring: Set[int], last: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return pairs of tokens of a layer that occur equally often in both sections, as many as are in order."""

    def marks(tokens: Sequence[Token], places: range, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
        found = ((i, tokens[i]) for i in places)
        layers = ((i, t.key, t.layer) for i, t in found if t.layer != _NO_LAYER and t.key in anchoring)
        return ((i, (key, _NO_LAYER if layer == end else layer)) for i, key, layer in layers)

    counts_a, counts_b = (Counter(m for _, m in marks(t, r, e)) for t, r, e in ((a, of_a, last[0]), (b, of_b, last[1])))
    seen: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[tuple[int, int], int], int] = {}
    for i, mark in marks(a, of_a, last[0]):
        if counts_a[mark] == counts_b[mark]:
            places[mark, seen[mark]] = i
            seen[mark] += 1
    seen.clear()
    found = []
    for j, mark in marks(b, of_b, last[1]):
        if counts_a[mark] == counts_b[mark]:
            found.append((places[mark, seen[mark]], j))
            seen[mark] += 1
    return _increasing(found)


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest run of pairs, which ascend in the second number, that ascends in the first."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for place, (i, _) in enumerate(pairs):
        at = bisect_left(tails, i)
        before.append(ends[at - 1] if at else -1)
        tails[at : at + 1], ends[at : at + 1] = [i], [place]
    found = []
    place = ends[-1] if ends else -1
    while place >= 0:
        found.append(pairs[place])
        place = before[place]
    return found[::-1]


def _gap(a: Sequence[Token], b: Sequence[Token], of_a: range, of_b: range) -> list[tuple[int, int]]:
    """Pair the tokens between two anchors."""
    mine, others = [a[i].key for i in of_a], [b[j].key for j in of_b]
    shorter, head, tail = min(len(mine), len(others)), 0, 0
    while head < shorter and mine[head] == others[head]:
        head += 1
    while tail < shorter - head and mine[-1 - tail] == others[-1 - tail]:
        tail += 1
    found = [(of_a[k], of_b[k]) for k in range(head)]
    found += _inner(mine[head : len(mine) - tail], others[head : len(others) - tail], of_a[head:], of_b[head:])
    return found + [(of_a[len(mine) - tail + k], of_b[len(others) - tail + k]) for k in range(tail)]


def _inner(mine: list[int], others: list[int], of_a: range, of_b: range) -> list[tuple[int, int]]:
    if not mine or len(mine) == len(others):
        return [(of_a[k] if mine else -1, of_b[k]) for k in range(len(others))]
    if len(mine) * len(others) > _LARGEST_GAP:
        raise NotAffine("too much differs from one depth to the next")
    found = []
    for kind, i, i_end, j, j_end in SequenceMatcher(None, mine, others, autojunk=False).get_opcodes():
        if kind == "delete" or (kind == "replace" and i_end - i != j_end - j):
            raise NotAffine("something is missing in the deeper model")
        found += [(-1 if kind == "insert" else of_a[i + k], of_b[j + k]) for k in range(j_end - j)]
    return found


def affine_key(first: int, second: int, times: int, keys: Keys) -> int:
    """Return the key ``times`` steps from the first on, where the second is one step from it: its numbers are affine.

    Raises:
        NotAffine: the two differ in more than numbers.
    """
    if first == second:
        return first
    a, b = keys.keys[first], keys.keys[second]
    if isinstance(a, AllocationKey) and isinstance(b, AllocationKey) and (a.stream, a.stack) == (b.stream, b.stack):
        nbytes = a.nbytes + times * (b.nbytes - a.nbytes)
        return keys.number(a._replace(nbytes=nbytes, tag=_affine_text(a.tag, b.tag, times)))
    if isinstance(a, FreeKey) and isinstance(b, FreeKey):
        return keys.number(FreeKey(affine_key(a.of, b.of, times, keys)))
    if isinstance(a, ClaimKey) and isinstance(b, ClaimKey) and a._replace(of=b.of) == b:
        return keys.number(a._replace(of=affine_key(a.of, b.of, times, keys)))
    raise NotAffine("an operation is another one in the deeper model")


def _affine_text(one: str, other: str, times: int) -> str:
    if _DIGITS.sub("#", one) != _DIGITS.sub("#", other):
        raise NotAffine(f"{one} is {other} in the deeper model")
    both = zip(_DIGITS.findall(one), _DIGITS.findall(other), strict=True)
    numbers = iter([int(x) + times * (int(y) - int(x)) for x, y in both])
    return _DIGITS.sub(lambda _: str(next(numbers)), one)
