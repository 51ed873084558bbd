"""Each cause of running out by itself, in a plain program: the verdict names it, and its remedy helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.oom.explain import explain_log
from tests.cuda.balance import Balance, analysed
from tests.cuda.emulated import device, run

pytestmark = pytest.mark.slow

Row = Callable[[str, Balance], None]
CARD = "3GiB"
CAUSES = {
    "full": "full", "limit": "limit", "fragmentation": "fragmentation", "larger": "larger_than_device"
}  # fmt: skip
# The order in which they happen in one process: what one recording saw is not in the next.
ORDER = ("larger", "fragmentation", "limit", "full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("causes")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = run("oom_causes", {"folder": str(folder), "causes": ORDER}, env=device(CARD))
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_the_message_is_explained_by_its_cause(told: dict[str, Any], name: str) -> None:
    (failure,) = explain_log(told[name]["error"]).failures
    assert failure.cause == CAUSES[name], failure.because


@pytest.mark.parametrize("name", CAUSES)
def test_the_recording_holds_the_failure_and_the_peak_before_it(
    told: dict[str, Any], folder: Path, name: str, row: Row
) -> None:
    report = analysed(folder / f"{name}.pickle")
    balance = Balance.of(report, told[name]["counters"])
    row(f"OOM in a program, {name}", balance)
    # Blocks without a training around them have no category to be found.
    assert balance.categories == balance.active
    assert balance.peak == balance.counter
    oom, (failure,) = report["oom"], explain_log(told[name]["error"]).failures
    assert oom["phase"] == "forward"
    assert any("oom_causes.py" in frame and frame.endswith(f" {name}") for frame in oom["stack"])
    assert abs(oom["requested_bytes"] - failure.requested_bytes) <= 0.01 * failure.requested_bytes
    assert oom["limited"] == (name == "limit")
    assert oom["limit_bytes"] == (3 * 2**28 if name == "limit" else None)
    assert oom["fits_defragmented"] == (name == "fragmentation")


def test_growing_segments_are_the_remedy_for_fragmentation(tmp_path: Path) -> None:
    asked = {"folder": str(tmp_path), "causes": ["fragmentation"]}
    told = run("oom_causes", asked, env=device(CARD, expandable=True))["fragmentation"]
    assert told["error"] is None
    assert told["counters"]["ooms"] == 0
