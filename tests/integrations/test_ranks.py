"""A real GRPO run on two ranks, under torchrun and under accelerate: both reports, one page, nothing changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
from memprof.integrations.callback import distributed
from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.callback.ranks import put_ranks_together
from memprof.integrations.run_recorder.output import Result, add_report, summarise

from tests.analysis.ranks.simulated import rank_report
from tests.report.files import validate
from tests.synthetic import SnapshotBuilder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/integrations/ranks_run.py"


def start(launcher: list[str], *arguments: object) -> str:
    """Run the script on two ranks; what it printed."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMPROF")
    settings = {k: v for k, v in os.environ.items() if k not in hidden}
    settings["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    command = [sys.executable, "-m", *launcher, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**settings, "OMP_NUM_THREADS": "1"}, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDP and FSDP2 under torchrun, each without memprof and with it."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "stdout.txt").write_text(
        start(["torch.distributed.run", "--standalone", "--nproc_per_node=2"], model, out, "ddp", "fsdp2")
    )
    return out


def report(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "_memprof" / f"step-000002.{name}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.trl
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_ranks_train_as_they_would_alone(runs: Path, kind: str) -> None:
    for rank in (0, 1):
        found = json.loads((runs / f"{kind}.rank-{rank}.json").read_text())
        assert found["watched"] == found["alone"]
        assert all(spread > 0 for spread in found["rewards"])


@pytest.mark.slow
@pytest.mark.trl
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_merged_report_is_the_ranks_own_put_together(runs: Path, kind: str) -> None:
    merged = report(runs / kind, "ranks")
    validate(merged)
    own = [report(runs / kind, f"rank-{rank}") for rank in (0, 1)]
    assert [r["rank"] for r in merged["ranks"]] == [0, 1]
    for summary, whole in zip(merged["ranks"], own, strict=True):
        assert (
            summary["peak"]["active_bytes"]
            == whole["peak"]["active_bytes"]
            == sum(summary["peak"]["categories"].values())
        )
        assert summary["own_peaks"] == {c: n for c, n in whole["own_peaks"].items() if n}
    across = merged["across_ranks"]
    assert (across["world_size"], across["missing"], across["steps"]) == (2, [], [2])
    assert across["peak"]["total_bytes"] == sum(r["peak"]["active_bytes"] for r in own)
    for row in across["categories"]:
        assert row["total_bytes"] == sum(r["peak"]["categories"][row["category"]] for r in own)
    highest = max(own, key=lambda r: r["peak"]["active_bytes"])
    assert merged["source"]["rank"] == across["peak"]["highest_rank"] == highest["source"]["rank"]
    page = (runs / kind / "_memprof" / "report.html").read_text()
    assert 'id="ranks"' in page
    printed = (runs / "stdout.txt").read_text()
    assert len(re.findall(r"^Rank \d.* in full:$", printed, re.MULTILINE)) == 2  # one table a run, by rank 0


@pytest.mark.slow
@pytest.mark.trl
def test_shards_of_the_model_by_closed_form(runs: Path) -> None:
    """FSDP2's shards in the trainer: gradients and moments; of the parameters the report says what is held."""
    shapes = json.loads((runs / "fsdp2.rank-0.json").read_text())["shapes"]
    padded = sum(4 * ceil(s[0] / 2) * prod(s[1:]) for s, _ in shapes)
    for rank in (0, 1):
        found = report(runs / "fsdp2", f"rank-{rank}")
        assert found["own_peaks"]["optimizer_state"] == 2 * padded + 4 * len(shapes)
        step = next(p for p in found["phases"] if p["phase"] == "optimizer_step")
        # The embedding is tied to the head: its gradient is reduced in two groups, each with a buffer of its own.
        assert step["categories"]["gradients"] == padded + 4 * ceil(shapes[0][0][0] / 2) * shapes[0][0][1]
        # transformers keeps each shard as a view of the whole parameter, which is said.
        assert step["categories"]["weights"] >= padded
        said = any("views of whole parameters" in note for note in found["notes"])
        assert said == (step["categories"]["weights"] > 1.25 * padded)


@pytest.mark.slow
@pytest.mark.trl
def test_ddp_holds_one_bucket_beside_the_gradients(runs: Path) -> None:
    shapes = json.loads((runs / "ddp.rank-0.json").read_text())["shapes"]
    trained = sum(4 * prod(s) for s, grad in shapes if grad)
    for rank in (0, 1):
        found = report(runs / "ddp", f"rank-{rank}")
        step = next(p for p in found["phases"] if p["phase"] == "optimizer_step")
        assert step["categories"]["communication"] >= trained
        assert step["categories"]["communication"] < 1.01 * trained
        assert step["categories"]["gradients"] == trained


@pytest.mark.heavy  # two ranks by torchrun are above, one by accelerate in tests/instrument/test_trainer.py
@pytest.mark.trl
def test_under_accelerate(model: Path, tmp_path: Path) -> None:
    port = str(20000 + os.getpid() % 20000)
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port]
    start(launcher, model, tmp_path, "ddp")
    merged = report(tmp_path / "ddp", "ranks")
    assert [r["rank"] for r in merged["ranks"]] == [0, 1]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"ddp.rank-{rank}.json").read_text())
        assert found["watched"] == found["alone"]


# -- telling rank 0, without a run -----------------------------------------------------------------------------------


def store() -> Any:
    from torch.distributed import HashStore

    return HashStore()


def gatherings(count: int, shared: Any, monkeypatch: pytest.MonkeyPatch) -> list[Gathering]:
    """As ``count`` processes would make them: each counts its own trainings."""
    found = []
    for rank in range(count):
        monkeypatch.setattr(distributed, "_begun", Counter())
        found.append(Gathering(rank, count, shared))
    return found


def test_ranks_use_the_first_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for rank 0, which may be late; a path may have bytes that are no UTF-8."""
    second, third, first = reversed(gatherings(3, store(), monkeypatch))
    path = "/runs/\udcff"
    assert second.agree_on("folder", path) == path
    assert first.agree_on("folder", "/another") == third.agree_on("folder", "/a third") == path
    identity = first.agree_on_identity()
    assert identity.id is not None
    assert second.agree_on_identity() == third.agree_on_identity() == identity
    later = Gathering(0, 3, first._store)
    assert later.agree_on_identity() != identity


def test_ranks_that_cannot_talk_have_no_common_id() -> None:
    assert Gathering(0, 2).agree_on("folder", "/runs") is None
    assert Gathering(0, 2).agree_on_identity().id is None
    assert Gathering(0, 1).agree_on_identity().id is not None


def test_what_is_told_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = gatherings(3, store(), monkeypatch)
    words = [{"rank": 1, "text": "größer"}, {"rank": 1}]
    assert second.tell(words)
    assert not second.tell([{}])  # once
    assert third.tell([])
    assert first.told(5) == {1: words, 2: []}
    assert not first.tell(words)  # rank 0 tells nobody


def test_a_rank_that_never_began_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = store()
    first = Gathering(0, 4, shared)
    begun = time.monotonic()
    assert first.told(600) == {}
    assert time.monotonic() - begun < 300


def test_a_killed_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    first, _, third = gatherings(3, store(), monkeypatch)
    monkeypatch.setattr(os, "getpid", lambda: gone.pid)
    monkeypatch.setattr(distributed, "_begun", Counter())
    Gathering(1, 3, first._store)  # says it is here, by a process that is no more
    third.tell([{"rank": 2}])
    begun = time.monotonic()
    assert first.told(600) == {2: [{"rank": 2}]}
    assert time.monotonic() - begun < 300


def test_a_silent_rank_costs_the_time_given_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, third = gatherings(3, store(), monkeypatch)
    third.tell([{"rank": 2}])
    begun = time.monotonic()
    assert first.told(0.3) == {2: [{"rank": 2}]}
    assert 0.3 <= time.monotonic() - begun < 60


def test_a_store_that_hangs_or_fails_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_STORE_SECONDS", 0.2)
    release = threading.Event()

    class Stuck:
        def set(self, *_: Any) -> None:
            release.wait(600)

        def check(self, *_: Any) -> bool:
            raise ConnectionError("the host is gone")

    begun = time.monotonic()
    assert not Gathering(1, 2, Stuck()).tell([{"rank": 1}])
    assert Gathering(0, 2, Stuck()).told(0.2) == {}
    assert time.monotonic() - begun < 300
    release.set()


def test_damaged_words_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = store()
    first, second = gatherings(2, shared, monkeypatch)
    shared.set(second._key("told", 1), "no hexadecimal")
    assert first.told(2) == {}


def test_one_process_alone_has_nobody_to_tell() -> None:
    alone = Gathering(0, 1)
    assert alone.told(10) == {}
    assert not alone.tell([rank_report(0, 1)])


def recorded(folder: Path, rank: int, extra_mib: int) -> Path:
    run = SnapshotBuilder()
    run.alloc(4 << 20, "main")
    run.free(run.alloc(extra_mib << 20, "step", "main"))
    extra = {"schema": "memprof.snapshot/1", "kind": "cuda", "rank": rank, "world_size": 4, "node": "here"}
    return run.save(folder / f"step-000002.rank-{rank}.pickle", extra)


@pytest.mark.parametrize("fullest", [0, 1, 2])
def test_ranks_that_died_are_read_from_what_they_left(tmp_path: Path, fullest: int) -> None:
    """Rank 1 left its report, rank 2 a snapshot only, rank 3 nothing; an older run's file is no rank's."""
    gathering = Gathering(0, 4)
    paths = [recorded(tmp_path, rank, 20 if rank == fullest else 2) for rank in (0, 1, 2)]
    result = summarise([paths[0]], tmp_path)
    add_report(Result(), paths[1], tmp_path / "elsewhere", page=False)
    old = recorded(tmp_path, 3, 50)
    os.utime(old, (1, 1))
    put_ranks_together(result, tmp_path, gathering, failed=True)
    merged = json.loads((tmp_path / "step-000002.ranks.json").read_text())
    validate(merged)
    assert [r["rank"] for r in merged["ranks"]] == [0, 1, 2]
    assert [m["rank"] for m in merged["across_ranks"]["missing"]] == [3]
    assert merged["source"]["rank"] == fullest
    assert merged["peak"]["active_bytes"] == merged["ranks"][fullest]["peak"]["active_bytes"]
    page = (tmp_path / "report.html").read_text()
    assert 'id="ranks"' in page
    assert f"rank {fullest} of 4" in page
    assert "No readable recording of rank 3." in result.table
