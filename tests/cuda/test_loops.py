"""Loops without a trainer on CUDA's own allocator: ``record``, ``attach``, streams, pools, compiled regions, the ring.

Two processes make all of them: one whose events are late, so that blocks wait for their streams, and one to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.balance import Balance, analysed
from tests.cuda.emulated import device, run

pytestmark = pytest.mark.slow

Row = Callable[[str, Balance], None]
MIB = 2**20
NAMES = ("recorded", "attached", "pending", "peaks_apart", "pool", "overflown", "recovered", "decoding")
# Long beside what runs between a free and the peak that it is still part of, short beside a test.
LATE_US = 400_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run("loops", {"folder": str(folder), "names": NAMES}, env=device(event_delay_us=LATE_US))
    return found


def report(folder: Path, name: str) -> dict[str, Any]:
    return analysed(folder / f"{name}.pickle")


def balanced(case: str, found: dict[str, Any], counters: dict[str, int], row: Row) -> Balance:
    balance = Balance.of(found, counters)
    row(case, balance)
    balance.check()
    return balance


def closed_forms(found: dict[str, Any], facts: dict[str, int]) -> None:
    own = {name: found["own_peaks"][name] for name in facts}
    # Blocks are rounded up to 512 bytes, and a large one may keep what was not worth splitting off.
    assert all(facts[name] <= own[name] <= facts[name] * 1.02 + 512 * 24 for name in facts), (own, facts)


def test_a_recorded_loop(told: dict[str, Any], folder: Path, row: Row) -> None:
    found = report(folder, "recorded")
    balance = balanced("record, plain loop", found, told["recorded"]["counters"], row)
    assert {"forward", "backward", "optimizer_step"} <= set(balance.phases)
    closed_forms(found, told["recorded"]["facts"])


def test_recording_a_loop_changes_nothing(told: dict[str, Any]) -> None:
    assert told["recorded"]["watched"] == told["recorded"]["alone"]
    losses = told["recorded"]["watched"][0]
    assert losses[0] != losses[1]


def test_nothing_of_a_loop_is_left_in_a_cycle(told: dict[str, Any]) -> None:
    """A model is freed with its last reference, not when Python happens to collect."""
    assert {name: one["left"] for name, one in told.items()} == dict.fromkeys(NAMES, 0)


def test_an_attached_worker(told: dict[str, Any], row: Row) -> None:
    found = analysed(Path(told["attached"]["snapshot"]))
    balance = balanced("attach, a worker's methods", found, told["attached"]["counters"], row)
    assert {"old_logprobs", "forward", "backward", "optimizer_step"} <= set(balance.phases)
    closed_forms(found, told["attached"]["facts"])


def test_a_block_that_waits_for_a_stream_is_in_the_peak(told: dict[str, Any], folder: Path, row: Row) -> None:
    found, counters = report(folder, "pending"), told["pending"]["counters"]
    balanced("a late event, pending at the peak", found, counters, row)
    assert told["pending"]["waiting"] == 32 * MIB, "the event was not late"
    assert found["peak"]["pending_free_bytes"] == 32 * MIB
    assert found["peak"]["active_bytes"] == counters["active_bytes"]


def test_the_highest_allocated_and_the_highest_active_can_be_apart(
    told: dict[str, Any], folder: Path, row: Row
) -> None:
    found, counters = report(folder, "peaks_apart"), told["peaks_apart"]["counters"]
    balanced("most active before most allocated", found, counters, row)
    assert counters["active_bytes"] > counters["allocated_bytes"]


def test_a_private_pool_is_told_apart(told: dict[str, Any], folder: Path, row: Row) -> None:
    found, one = report(folder, "pool"), told["pool"]
    balanced("MemPool", found, one["counters"], row)
    peak = found["peak"]
    assert peak["private_pool_bytes"] == 24 * MIB
    idle = peak["cached_bytes"] + peak["inactive_split_bytes"] + peak["private_pool_bytes"]
    assert peak["reserved_bytes"] - peak["active_bytes"] == idle == one["idle"]


def test_what_the_ring_lost_inside_a_step_is_counted(told: dict[str, Any], folder: Path, row: Row) -> None:
    found, one = report(folder, "overflown"), told["overflown"]
    balance = Balance.of(found, one["counters"])
    row("ring of 200 events, one step", balance)
    assert balance.categories == balance.active
    assert balance.peak == balance.counter
    assert found["source"]["history"] == "truncated"
    assert balance.lost > balance.active // 2
    assert any("counter" in note and "max_entries" in note for note in found["notes"])
    assert found["peak"]["phase"] == "backward"


def test_an_error_that_was_caught_is_not_in_the_next_recording(told: dict[str, Any], folder: Path) -> None:
    assert told["recovered"]["counters"]["ooms"] >= 1
    assert report(folder, "recovered-first")["oom"]["requested_bytes"] == 2**50
    assert report(folder, "recovered")["oom"] is None


def test_blocks_that_wait_while_decoding_is_thinned(told: dict[str, Any], folder: Path, row: Row) -> None:
    """Each token leaves a block to a late stream; most tokens are not recorded."""
    found, one = report(folder, "decoding"), told["decoding"]
    balance = Balance.of(found, one["counters"])
    row("generate, thinned, blocks waiting", balance)
    assert balance.categories == balance.active
    assert balance.peak == balance.counter
    assert one["waiting"] > 0
    assert one["thinned"]
    assert not [note for note in found["notes"] if "contradict" in note]


@pytest.fixture(scope="module")
def compiled(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run("loops", {"folder": str(folder), "names": ["compiled"]})["compiled"]
    return found


def test_a_compiled_region(compiled: dict[str, Any], folder: Path, row: Row) -> None:
    assert compiled["graphs"] >= 1
    found = report(folder, "compiled")
    balanced("torch.compile, inductor", found, compiled["counters"], row)
    closed_forms(found, compiled["facts"])


_WHOLE, _PARTS = ["complete"] * 2, ["truncated"] * 2
#: What the program does -> the history of the two devices, and whether torch's history is on afterwards.
_CASES: dict[str, tuple[list[str], bool]] = {
    "nothing": (_WHOLE, False),
    "stops": (_PARTS, False),
    "imported stops": (_PARTS, False),
    "clears": (_PARTS, True),
    "imported clears": (_PARTS, True),
    "restarts": (_PARTS, True),
    "shortens": (["complete", "truncated"], True),  # the first device has fewer events than the shorter ring
    "records": (_WHOLE, True),
    "imported records": (_WHOLE, True),
    "own is on": (_WHOLE, True),
    "own overflows": (["complete", "truncated"], True),
    "own stops": (_PARTS, False),
    "skips": (_WHOLE, True),
    "own skips": (_WHOLE, True),
}


@pytest.fixture(scope="module")
def switched() -> Any:
    asked = [(case, kept) for case in _CASES for kept in (0, 3)]
    return run("switched_history", asked, env=device(devices=2))


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("case", _CASES)
def test_each_device_is_judged_by_its_own_trace(case: str, kept: int, switched: Any) -> None:
    """Whether blocks stay or all are freed again; tensors of before memprof's start are freed before it begins."""
    history, is_on = _CASES[case]
    got = switched[f"{case} {kept}"]
    assert (got["history"], got["is on"]) == (history, is_on)
    seen = [note for note in got["notes"] if "memory history" in note or "_record_memory_history" in note]
    says_more = case.endswith("skips") or (case.startswith("own") and history != _WHOLE)
    assert len(seen) == (case != "nothing") + says_more
    if case in ("records", "imported records"):
        assert got["left"] > 240, "what memprof and the program recorded is left to the program"
