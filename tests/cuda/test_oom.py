"""Out of memory where it happens: in generation, forward, backward and the optimizer's first step.

At a process limit and on a card that is full, with and without expandable segments. Each time the run's exception is
its own, page and snapshot tell the phase, and what ``memprof oom`` makes of the message is the right cause.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.advice.closed_loop import CASES as DYING
from benchmarks.advice.closed_loop import Runs, follow
from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure
from memprof.units import format_bytes
from tests.cuda.balance import Balance, report_of
from tests.cuda.emulated import command_line, device, run

pytestmark = [pytest.mark.slow, pytest.mark.trl]

Row = Callable[[str, Balance], None]
MIB = 2**20
CONTEXT = 512 * MIB
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_CHECKPOINTED = {"gradient_checkpointing": True}
# Runs that need most in one phase, and what they may take: enough for all phases before it and not for that one.
# Allocated in them, and reserved before, in MiB: 505 and 36; 530 and 200; 132 and 104; 130 and 80.
CASES: dict[str, dict[str, Any]] = {
    "generate": {"lora": True, "prompt": 1024, "settings": {
        "num_generations": 16, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, **_CHECKPOINTED}},
    "forward": {"lora": True, "prompt": 1024},
    "backward": {"prompt": 512, "settings": _CHECKPOINTED},
    "optimizer_step": {"prompt": 16, "settings": {"num_generations": 2, "per_device_train_batch_size": 2}},
}  # fmt: skip
LIMITS = {"generate": 280 * MIB, "forward": 396 * MIB, "backward": 118 * MIB, "optimizer_step": 104 * MIB}
FULL = [("generate", False), ("forward", True), ("backward", False), ("optimizer_step", True)]
HEAVY = ("generate", "forward")  # at a limit they are tried too


def case(phase: str, **more: Any) -> dict[str, Any]:
    asked = CASES[phase]
    settings = {**asked.get("settings", {}), "max_steps": 1}
    return {"name": phase, "by_trainer": True, **asked, "shape": SHAPE, "settings": settings, **more}


@pytest.fixture(scope="module", params=[False, True], ids=["default", "expandable"])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case in one process, at a limit that torch holds it to."""
    folder = tmp_path_factory.mktemp("limited")
    cases = [case(phase, limit=limit) for phase, limit in LIMITS.items()]
    # Only small tensors have values: token ids, masks and rewards.
    env = device(expandable=request.param, values_max=8192)
    told: dict[str, Any] = run("grpo_runs", {"folder": str(folder), "cases": cases}, env=env)
    return {"folder": folder, "label": "expandable" if request.param else "default", **told}


@pytest.mark.parametrize("phase", CASES)
def test_at_a_limit_of_the_process(limited: dict[str, Any], phase: str, row: Row) -> None:
    failure = explained(limited["folder"], phase, limited[phase], row, f"OOM at a limit, {limited['label']}, {phase}")
    assert failure.cause == "limit"
    assert abs(failure.allowed_bytes - LIMITS[phase]) < MIB
    oom = report_of(snapshot_in(limited["folder"], phase))["oom"]
    assert oom["limited"]
    assert abs(oom["limit_bytes"] - LIMITS[phase]) < MIB


Full = Callable[[str, bool], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Full:
    """Return a function that runs a case on a card that is full, once: its folder, and what it told."""

    @functools.cache
    def tried(phase: str, expandable: bool) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("full")
        env = device(f"{LIMITS[phase] + CONTEXT} B", expandable=expandable, values_max=8192)
        told: dict[str, Any] = run("grpo_runs", {"folder": str(folder), "cases": [case(phase)]}, env=env)[phase]
        return folder, told

    return tried


@pytest.mark.parametrize(
    ("phase", "expandable"),
    [
        pytest.param(p, e, id=f"{p}{'-expandable' * e}", marks=[pytest.mark.heavy] if p in HEAVY else [])
        for p, e in FULL
    ],
)
def test_on_a_full_card(phase: str, expandable: bool, full: Full, row: Row) -> None:
    folder, told = full(phase, expandable)
    kind = "expandable" if expandable else "default"
    failure = explained(folder, phase, told, row, f"OOM on a full card, {kind}, {phase}")
    oom = report_of(snapshot_in(folder, phase))["oom"]
    assert not oom["limited"]
    # These cards are small beside the allocator's segments of 20 MiB: what is idle can be enough, or what is free.
    free, asked = failure.device_free_bytes, failure.requested_bytes
    idle = oom["cached_bytes"] + oom["inactive_split_bytes"]
    assert failure.cause == ("refused" if free >= asked else "fragmentation" if idle + free >= asked else "full")


def test_on_a_card_as_large_as_simulated_it_runs(full: Full, tmp_path: Path) -> None:
    """What failed is simulated like it was recorded; a card of the size that comes out is enough."""
    phase = "backward"
    folder, told = full(phase, False)
    assert told["error"] is not None
    snapshot = snapshot_in(folder, phase)
    command = [sys.executable, "-m", "memprof", "simulate", "--like", str(snapshot), "--json", "-"]
    done = command_line(command, env=device())
    assert done.returncode == 0, done.stderr[-2000:]
    needed = json.loads(done.stdout)["runs"][-1]["report"]["device_peak"]["reserved_bytes"]
    assert needed > LIMITS[phase]
    enough = device(f"{needed + CONTEXT} B", values_max=8192)
    told = run("grpo_runs", {"folder": str(tmp_path), "cases": [case(phase)]}, env=enough)[phase]
    assert told["error"] is None


def snapshot_in(folder: Path, phase: str) -> Path:
    (snapshot,) = (folder / phase / "_memprof").glob("*.pickle")
    return snapshot


def explained(folder: Path, phase: str, told: dict[str, Any], row: Row, name: str) -> ExplainedFailure:
    """Check what was written when the run failed; what ``memprof oom`` says of its message."""
    assert told["error"] is not None, "it fitted"
    assert told["counters"]["ooms"] >= 1
    snapshot = snapshot_in(folder, phase)
    report = report_of(snapshot)
    balance = Balance.of(report, told["counters"])
    row(name, balance)
    balance.check()
    oom = report["oom"]
    assert oom["phase"] == phase
    assert oom["step"] == 1
    assert sum(oom["categories"].values()) == oom["allocated_bytes"]
    (failure,) = explain_log(told["error"]).failures
    # The history has what the program asked for; the message has the segment, with two decimals.
    assert oom["requested_bytes"] <= 1.01 * failure.requested_bytes <= 1.02 * segment(oom["requested_bytes"])
    page = (snapshot.parent / "report.html").read_text(encoding="utf-8")
    assert format_bytes(oom["requested_bytes"]) in page
    assert "Out of memory in " + phase.replace("_", " ") in page.replace("_", " ")
    return failure


def segment(size: int) -> int:
    """Return the bytes torch asks the driver for to hold a block."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


# A later step that fails where the state is there; a first optimizer step without room for it.
PROMISED = [
    pytest.param("full, AdamW, no checkpointing", 0.9, 2, id="later step", marks=pytest.mark.heavy),
    pytest.param("full, foreach AdamW, reference", 0.7, 1, id="first step"),
]


@pytest.fixture(scope="module")
def runs() -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPROF_CUDA_PYTHON", sys.executable)
        return Runs(most=65536)  # memory is asked for, and the masks that sizes follow from have values


@pytest.mark.parametrize(("name", "share", "step"), PROMISED)
def test_what_is_promised_to_be_enough_is(runs: Runs, name: str, share: float, step: int) -> None:
    limit = int(share * runs(DYING[name])["reserved_bytes"])
    row = follow(runs, {"run": name, "limit_bytes": limit}, simulate=False)
    assert row is not None, "it lived without advice"
    assert row["step"] == step
    assert row["estimated"]["promised"]
    assert row["estimated"]["lived"], row["estimated"]["error"]
