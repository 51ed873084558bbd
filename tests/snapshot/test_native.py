"""The native scanner reads what the Python reader reads, column by column, or leaves the file to it."""

from __future__ import annotations

import gzip
import importlib
import lzma
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from memprof._native import scanner
from memprof.allocator.settings import AllocatorSettings
from memprof.errors import InputError
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.snapshot.rows import scan
from memprof.snapshot.unpickle import plain_from_bytes
from tests.snapshot.exercise import valid
from tests.snapshot.programs import MIB, Program, programs, raised
from tests.snapshot.test_safety import BOMBS, HEAD, Evil, files
from tests.snapshot.test_shared_stacks import raw_snapshot, same

built = pytest.mark.skipif(scanner() is None, reason="the extension was not built, or MEMPROF_NATIVE=0")


def event(number: int, **more: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": 512 * number, "size": 5, "stream": 0, "frames": [], **more}


def shapes() -> Iterator[dict[str, Any]]:
    """Snapshots in which something is as only some releases or some runs write it."""
    frame = {"filename": "träin.py", "line": 3, "name": "step"}
    times = [event(i, time_us=t) for i, t in enumerate([None, 4, None, 9])]
    oom = {"action": "oom", "device_free": 77, "size": 9, "stream": 0, "time_us": 9, "frames": [frame]}
    pools = [event(i, pool_id=(i % 3, 300 * (i % 2))) for i in range(8)]
    texts = [event(i, user_metadata=t, compile_context="N/A") for i, t in enumerate(["a", "", None, "a", "ü"])]
    deep = [frame, *({**frame, "line": i} for i in range(2300))]
    twice = [event(1, frames=deep), event(2, frames=list(deep)), event(3, frames=deep[:-1]), event(4, frames=deep)]
    odd = [event(1, action="what"), event(2, action="who"), event(3, action="what"), oom, {**oom, "device_free": None}]
    for traces in (
        [times],
        [[], pools, texts],
        [twice],
        [odd, [], times[:1]],
        [[]],
        [[event(1), event(1, pool_id=(0, 1))]],
    ):
        yield {"segments": [], "device_traces": traces, "allocator_settings": {"a": 1.5, "b": [True, None, -3]}}
    program = Program(AllocatorSettings(expandable_segments=True))
    yield program.run([("malloc", 5 * MIB, 7, 1), ("malloc", 70, 0, 0), ("free", 0, 0, 0), ("pend", 0, 0, 0)]).raw()


def compare(data: bytes, *, least: int = 1, taken: bool = True) -> None:
    """The scanner takes a pickle, fed in pieces of many sizes, and gives what Python reads from it."""
    whole = snapshot_from_raw(plain_from_bytes(data, "x"))
    for step in (least, 13 * least, len(data)):
        found = scan(data[at : at + step] for at in range(0, len(data), step))
        if found is None and not taken:
            continue
        assert found is not None
        assert same(snapshot_from_raw(found[0], rows=found[1]), whole)


@built
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_layout_and_protocol(protocol: int) -> None:
    for raw in (*shapes(), raw_snapshot(40), pickle.loads(valid())):
        compare(pickle.dumps(raw, protocol=protocol))


@built
@pytest.mark.parametrize("protocol", [2, 4])
def test_unsigned_addresses_and_streams(protocol: int) -> None:
    program = Program(AllocatorSettings())
    raw = raised(program.run([("malloc", 5 * MIB, 7, 1), ("malloc", 70, 0, 0), ("free", 0, 0, 0)]).raw())
    raw["device_traces"][0].append({"action": "oom", "device_free": 2**63, "size": 9, "stream": 0, "time_us": 999})
    compare(pickle.dumps(raw, protocol=protocol))


@built
@pytest.mark.parametrize(
    "wrong", [{"addr": -5}, {"addr": 2**64}, {"size": 2**63}, {"time_us": 2**63}, {"addr": 2**62 + 1}]
)
def test_what_is_no_address_is_left_to_python(wrong: dict[str, int]) -> None:
    data = pickle.dumps({"segments": [], "device_traces": [[event(1), event(2, **wrong)]]}, protocol=4)
    found = scan([data])
    with pytest.raises((InputError, ValueError)):
        snapshot_from_raw(*([plain_from_bytes(data, "x")] if found is None else [found[0]]), rows=found and found[1])


@built
@settings(max_examples=40, deadline=None)
@given(programs())
def test_random_programs(program: Program) -> None:
    compare(pickle.dumps(program.raw(), protocol=4))


@built
@settings(max_examples=100, deadline=None)
@given(files)
def test_nonsense_of_the_right_shape(raw: dict[str, Any]) -> None:
    """Read as Python reads it, or left to Python."""
    data = pickle.dumps(raw, protocol=4)
    found = scan([data])
    if found is None:
        return
    results = []
    for plain, rows in (found, (plain_from_bytes(data, "x"), None)):
        try:
            results.append(snapshot_from_raw(plain, rows=rows))
        except InputError as error:
            results.append(error)
    assert isinstance(results[0], InputError) or same(*results)


@built
def test_real_snapshots(shared: Path) -> None:
    """Each is taken by the scanner, but for torch 2.0's bare list of segments."""
    for file in sorted((shared / "snapshots").glob("*.pickle")):
        compare(file.read_bytes(), least=4999, taken="legacy-list" not in file.name)


@built
def test_what_must_be_refused_is_left_to_python() -> None:
    evil = pickle.dumps({"segments": [], "device_traces": [Evil(len, "x")]}, protocol=4)
    straddling = b"\x80\x04\x95" + struct.pack("<Q", 5) + b"]\x8c\x04abcd\x94."
    holds_itself: dict[str, Any] = {"segments": [], "device_traces": []}
    holds_itself["memprof"] = {"config": holds_itself}
    itself = pickle.dumps(holds_itself, protocol=4)
    for data in (
        evil,
        straddling,
        itself,
        valid()[:-1],
        valid()[:40],
        b"",
        b"{}",
        *(HEAD + bomb for bomb in BOMBS.values()),
    ):
        assert scan([data]) is None


@built
def test_mutated_snapshots_are_read_alike() -> None:
    """A little of what ``benchmarks.reading fuzz-scan`` does by the million."""
    from benchmarks.reading.fuzz_scan import compared, mutated

    dice = random.Random(0)
    seeds = [
        valid(),
        *(pickle.dumps(raw, protocol=p) for raw in list(shapes())[::2] for p in (2, 4) if len(str(raw)) < 9000),
    ]
    assert sum(compared(mutated(dice, seeds), dice) for _ in range(3000)) > 100


@built
def test_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.pickle"
    file.write_bytes(valid())
    native = load_snapshot(file)
    monkeypatch.setenv("MEMPROF_NATIVE", "0")
    assert scanner() is None
    assert same(load_snapshot(file), native)


@pytest.mark.parametrize("native", ["0", "1"])
def test_packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    """gzip (in several members too), xz and zstd; cut short and damaged ones end in a sentence."""
    monkeypatch.setenv("MEMPROF_NATIVE", native)
    data = pickle.dumps(raw_snapshot(4000), protocol=4)
    plain = snapshot_from_raw(plain_from_bytes(data, "x"))
    packs = {"gzip": gzip.compress(data[:900]) + gzip.compress(data[900:]), "xz": lzma.compress(data)}
    packs |= {"zstd": packed} if (packed := zstd_of(data)) else {}
    for kind, packed in packs.items():
        file = tmp_path / "run.pickle"
        file.write_bytes(packed)
        assert same(snapshot_from_raw(plain_from_bytes(packed, "x")), plain)
        assert same(load_snapshot(file).traces, plain.traces)
        for broken in (packed[: len(packed) * 2 // 3], packed[:10]):
            file.write_bytes(broken)
            with pytest.raises(InputError, match=f"the {kind} data end too early"):
                load_snapshot(file)
        file.write_bytes(packed[:20] + b"\xff" * 50 + packed[20:])
        with pytest.raises(InputError, match=f"damaged {kind} data|{kind} data end too early"):
            load_snapshot(file)


def zstd_of(data: bytes) -> bytes | None:
    """Pack with zstd where this Python can."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            packed: bytes = importlib.import_module(name).compress(data)
        except ImportError:
            continue
        return packed
    return None


@built
@pytest.mark.parametrize("error", [MemoryError, OSError, AssertionError, KeyError, RuntimeError, UnicodeError])
@pytest.mark.parametrize("fails", ["scanner", "feed", "finish", "rows"])
def test_where_the_scanner_fails_python_reads_the_same(
    fails: str, error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fails:
        """A scanner that does all of it, up to one call."""

        def __init__(self) -> None:
            self._whole = scanner()

        def __getattr__(self, name: str) -> Any:
            return fail if name == fails else getattr(self._whole, name)

    def fail(*_: Any) -> Any:
        raise error("injected")

    (path := tmp_path / "run.pickle").write_bytes(pickle.dumps(raw_snapshot(9), protocol=4))
    whole = load_snapshot(path)
    place, new = ("scanner", fail if fails == "scanner" else Fails) if fails != "rows" else ("_interned", fail)
    monkeypatch.setattr(importlib.import_module("memprof.snapshot.rows"), place, new)
    assert same(load_snapshot(path), whole)
