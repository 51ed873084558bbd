"""Files made to hurt their reader, and files that are merely broken: one sentence, nothing else."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.errors import InputError, UnsafePickle
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.snapshot.unpickle import plain_from_bytes
from memprof.timeline.timeline import build_timeline
from tests.snapshot.exercise import survives, valid

HEAD = b"\x80\x04"


class Evil:
    """Would touch a file when unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_with_a_global_does_nothing_and_is_named(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "was-here"
    for name, evil in {
        "os.mkdir|posix.mkdir": Evil(os.mkdir, str(mark)),
        "builtins.eval|__builtin__.eval": Evil(eval, f"open({str(mark)!r}, 'w')"),
        "copyreg|copy_reg|collections": __import__("collections").OrderedDict(a=1),
        "pathlib|posixpath": Path("x"),
    }.items():
        file = tmp_path / "evil.pickle"
        file.write_bytes(pickle.dumps({"segments": [], "device_traces": [evil]}, protocol=protocol))
        with pytest.raises(UnsafePickle) as caught:
            load_snapshot(file)
        assert not mark.exists()
        assert any(part in str(caught.value) for part in name.split("|")), str(caught.value)
        assert "not read" in str(caught.value)


def test_persistent_ids_and_extensions_are_refused() -> None:
    for body in (b"Pabc\n.", b"K\x01Q.", b"\x82\x01.", b"c__main__\nx\n.", b"(i__main__\nx\n.", b"NNR."):
        with pytest.raises(UnsafePickle):
            plain_from_bytes(HEAD + body, "x")


def long_text(size: int) -> bytes:
    return b"\x8d" + struct.pack("<Q", size) + b"abc"


BOMBS = {
    "memo index": b"}r\xff\xff\xff\x7f.",
    "memo index, decimal": b"}p999999999\n.",
    "text of an exabyte": long_text(1 << 60) + b".",
    "text of four gigabytes": b"X\xff\xff\xff\xffabc.",
    "bytes of a terabyte": b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "bytearray of a terabyte": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "frame of an exabyte": b"\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "number of 2 GiB": b"\x8b\xff\xff\xff\x7f.",
    "number of a megabyte": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
    "number in decimals": b"L" + b"9" * 1_000_000 + b"L\n.",
    "nested tuples as a key": b"}K\x00" + b"\x85" * 3_000_000 + b"Ns.",
    "tuples that double": b"}N" + b"\x94h\x00h\x00\x86" * 64 + b"Ns.",
    "wide tuples": b"(" + b"N" * 500 + b"t(" + b"h\x00" * 500 + b"t.",
    "a million lists in each other": b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "empty dicts only": b"(" + b"}" * 4_000_000 + b"l.",
    "sets": b"\x8f(K\x01\x90.",
    "marks": b"(" * 5_000_000 + b".",
    "duplicates": b"]" + b"2" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    """Refused in a few megabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as caught:
        snapshot_from_raw(plain_from_bytes(HEAD + BOMBS[name], "bomb.pickle"))
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_self_reference_and_depth_inside_a_valid_shape() -> None:
    """Lists that hold themselves, where a list is expected: no recursion, no endless loop."""
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    double: Any = 1
    for _ in range(60):
        double = [double, double]
    event = {"action": "alloc", "addr": 512, "size": 5, "stream": 0, "time_us": 1}
    for nasty in (loop, deep, double):
        raw = {
            "segments": [],
            "device_traces": [
                [{**event, "frames": nasty, "pool_id": nasty, "user_metadata": nasty, "action": "alloc"}]
            ],
            "allocator_settings": {"expandable_segments": nasty},
            "external_annotations": nasty,
            "memprof": {"config": {"a": nasty}, "recorded": nasty, "versions": {"torch": nasty}},
        }
        buffer = io.BytesIO()
        pickler = pickle._Pickler(buffer, 4)  # the Python one gives up on depth, so: only where it does not
        if nasty is not deep:
            pickler.dump(raw)
            raw = plain_from_bytes(buffer.getvalue(), "x")
        snapshot = snapshot_from_raw(raw)
        assert build_timeline(snapshot).max_requested == 5
        assert snapshot.run.config is None


def test_frames_may_begin_anywhere() -> None:
    """Between the two numbers of a pool's id, say: every event with pairs of its own, over many frames."""
    event = {"action": "alloc", "addr": 512, "size": 5, "stream": 0, "time_us": 1, "frames": []}
    trace = [{**event, "addr": 512 * i, "pool_id": (i % 300, i % 2), "pad": "x" * (i % 97)} for i in range(1, 30_000)]
    data = pickle.dumps({"segments": [], "device_traces": [trace]}, protocol=4)
    assert data.count(b"\x95") > 20
    snapshot = snapshot_from_raw(plain_from_bytes(data, "x"))
    assert build_timeline(snapshot).max_requested == 5 * len(trace)
    assert len(snapshot.pools) == 300


def test_gzip_bombs() -> None:
    small = gzip.compress(b"\0" * 200_000_000, 6)
    with pytest.raises(InputError, match="unpacks to more than"):
        plain_from_bytes(small, "x")
    with pytest.raises(InputError, match="gzip"):
        plain_from_bytes(gzip.compress(valid())[:-9], "x")
    with pytest.raises(InputError, match="damaged gzip"):
        plain_from_bytes(b"\x1f\x8b" + b"abc" * 9, "x")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello, this is text\n", "a text file"),
        (b"\x00\x01\x02\xff\xfe" * 20, "not a pickle"),
        (b"PK\x03\x04rest", "a damaged zip file"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
        (b'{"segments": [', "damaged JSON"),
        (b'{"a": ' * 4_000, "damaged JSON"),
        (b"[" * 4_000, "damaged JSON"),
        (b"[" * 100_000, "empty containers"),
        (valid()[:-40], "ends too early"),
        (valid()[:30], "ends too early"),
        (b"\x80\x04.", "not a memory snapshot"),
        (b"\x80\x04\x94.", "not a memory snapshot"),
        (b"\x80\x04h\x05.", "not a memory snapshot"),
        (b"\x80\x04\xff.", "damaged"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "some.pickle"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_snapshot(file)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert caught.value.exit_code == 3


def test_places_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_bytes(valid())
    for path, says in {
        tmp_path: "a folder",
        tmp_path / "nowhere": "no such file",
        tmp_path / "pipe": "not a regular file",
        Path("/dev/zero"): "not a regular file",
        tmp_path / "a\0b": "not a file name",
        tmp_path / ("x" * 400): "cannot be read",
    }.items():
        with pytest.raises(InputError, match=says):
            load_snapshot(path)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_bytes_never_crash(data: st.DataObject) -> None:
    good = bytearray(valid())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(good) - 1))
        what = data.draw(st.sampled_from(["set", "cut", "insert", "copy"]))
        if what == "set":
            good[at] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del good[at : at + data.draw(st.integers(1, 20))]
        elif what == "insert":
            good[at:at] = data.draw(st.binary(max_size=8))
        else:
            end = at + data.draw(st.integers(1, 60))
            good[at:at] = good[at:end]
        if not good:
            break
    survives(bytes(good))


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 66), 1 << 66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
small = st.integers(0, 6).map(lambda n: n * 512)


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Now and then something else."""
    return st.integers(0, 30).flatmap(lambda n: anything if n == 0 else usual)


actions = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map"]
actions += ["segment_unmap", "oom", "snapshot", "what"]
states = ["active_allocated", "active_pending_free", "inactive"]
events = st.fixed_dictionaries(
    {"action": mostly(st.sampled_from(actions)), "addr": mostly(small), "size": mostly(small), "stream": mostly(small)},
    optional={"time_us": mostly(st.integers()), "frames": anything, "pool_id": anything, "user_metadata": anything},
)
blocks = st.fixed_dictionaries(
    {"size": mostly(small), "state": mostly(st.sampled_from(states))},
    optional={"address": mostly(small), "requested_size": mostly(small), "frames": anything, "history": anything},
)
segments = st.fixed_dictionaries(
    {"address": small, "total_size": mostly(small), "stream": small, "blocks": st.lists(blocks, max_size=4)},
    optional={
        "device": st.integers(0, 2),
        "segment_type": st.just("large"),
        "is_expandable": st.booleans(),
        "segment_pool_id": mostly(st.tuples(small, small)),
    },
)
extras = st.dictionaries(st.sampled_from(["kind", "recorded", "versions", "phases", "notes"]), anything)
files = st.fixed_dictionaries(
    {"segments": st.lists(segments, max_size=4), "device_traces": st.lists(st.lists(events, max_size=12), max_size=2)},
    optional={"memprof": anything | extras, "allocator_settings": anything},
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(files)
def test_nonsense_of_the_right_shape_never_crashes(raw: dict[str, Any]) -> None:
    """Contradictory histories still add up; what cannot be used is refused."""
    survives(pickle.dumps(raw, protocol=4))


CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("file", CORPUS, ids=lambda f: f.name)
def test_the_fuzzers_corpus(file: Path) -> None:
    survives(file.read_bytes())


def test_what_is_checked_is_what_is_read() -> None:
    """A text that straddles a frame's end: the C unpickler, left to itself, skips two bytes and runs the text after it.

    That text spells an opcode which reserves four gigabytes.
    """
    hidden = b"r\x7f\x7f\x7f\x0f"
    frame = b"]\x8c\x04ab"
    straddling = b"\x80\x04\x95" + struct.pack("<Q", len(frame)) + frame + b"cd" + b"\x8c\x05" + hidden + b"."
    assert plain_from_bytes(straddling, "straddling") == hidden.decode()


def test_a_frame_longer_than_the_file_is_a_file_cut_short() -> None:
    with pytest.raises(InputError, match="ends too early"):
        plain_from_bytes(b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"].", "short")


def test_texts_too_long_for_a_frame_are_read() -> None:
    value = [{"name": "x" * 200_000, "line": 3}, "y" * 70_000, [1, 2]]
    assert plain_from_bytes(pickle.dumps(value, protocol=4), "long") == value
