"""``memprof report`` over folders that frameworks write, laid out as each lays them out, of real snapshots.

The layouts were read in each project's source, see ``memprof/analysis/ranks/dump_names.py`` and ``docs/frameworks.md``.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from memprof.analysis.ranks.dump_names import DumpLayout, DumpName, dump_name, layouts
from tests.cli.test_cli import MIB, call, report_of
from tests.cli.test_report_ranks import record

TRAINS = "cs336-medium-train-ctx256-t211.pickle"
INFERS = "cs336-medium-infer-ctx512-t211.pickle"
SMALL = "linear-grad-t24.pickle"
OTHER = "linear-nograd-t24.pickle"
OUT = "flexgen-opt-oom-t20.pickle"


class Layout(NamedTuple):
    """Files of a folder (name in it, snapshot it is a copy of), and which of them the page shows as ranks."""

    files: dict[str, str]
    shown: list[str]
    says: dict[str, dict[str, Any]]


LAYOUTS = {
    # verl/utils/memory_utils.py: step{N}/{tag}_rank{RANK}_pid{PID}.pickle; a role is a process of its own
    "verl": Layout(
        {
            "step1/torch_memory_rank0_pid100.pickle": SMALL,
            "step3/torch_memory_rank0_pid100.pickle": TRAINS,
            "step3/torch_memory_rank0_pid200.pickle": OUT,
            "step3/torch_memory_rank1_pid101.pickle": TRAINS,
            "step3/torch_memory_rank1_pid201.pickle": OUT,
        },
        ["step3/torch_memory_rank0_pid100.pickle", "step3/torch_memory_rank1_pid101.pickle"],
        {"step3/torch_memory_rank1_pid201.pickle": {"pid": 201, "step": 3, "rank": 1}},
    ),
    "verl, no step": Layout(
        {
            "20260112-1033/torch_memory_rank0_pid100.pickle": SMALL,
            "20260112-1041/torch_memory_rank0_pid100.pickle": SMALL,
        },
        ["20260112-1041/torch_memory_rank0_pid100.pickle"],
        {"20260112-1033/torch_memory_rank0_pid100.pickle": {"time": "2026-01-12 10:33"}},
    ),
    # verl/utils/profiler/torch_memory_profile.py: windows of steps, and the allocator's own word that memory ran out
    "verl, out of memory": Layout(
        {
            "steps1-3/torch_memory_rank0_pid100.pickle": SMALL,
            "steps4-6/torch_memory_rank0_pid100.pickle": SMALL,
            "oom_20260112-103305-123456/torch_memory_oom_rank0_pid100.pickle": OUT,
        },
        ["oom_20260112-103305-123456/torch_memory_oom_rank0_pid100.pickle"],
        {
            "steps1-3/torch_memory_rank0_pid100.pickle": {"step": 3, "label": "steps1-3"},
            "oom_20260112-103305-123456/torch_memory_oom_rank0_pid100.pickle": {
                "out_of_memory": True,
                "time": "2026-01-12 10:33:05",
                "step": None,
            },
        },
    ),
    # skyrl/backends/skyrl_train/workers/worker.py: rank_{rank}_{model}_{tag}_{how many dumps so far}.pickle
    "SkyRL": Layout(
        {
            "memory_snapshots/rank_0_policy_forward_backward_1.pickle": SMALL,
            "memory_snapshots/rank_0_policy_optim_step_2.pickle": SMALL,
            "memory_snapshots/rank_0_policy_forward_backward_3.pickle": OTHER,
            "memory_snapshots/rank_1_policy_forward_backward_1.pickle": SMALL,
            "memory_snapshots/rank_1_policy_optim_step_2.pickle": SMALL,
            "memory_snapshots/rank_1_policy_forward_backward_3.pickle": OTHER,
        },
        [
            "memory_snapshots/rank_0_policy_forward_backward_3.pickle",
            "memory_snapshots/rank_1_policy_forward_backward_3.pickle",
        ],
        {"memory_snapshots/rank_0_policy_optim_step_2.pickle": {"step": None, "label": "optim_step", "role": "actor"}},
    ),
    # megatron/training/utils/utils.py and NVIDIA-NeMo/Megatron-Bridge: the rank behind the name that was asked for
    "Megatron Bridge": Layout(
        {"snapshot_0.pickle": SMALL, "snapshot_8.pickle": OTHER}, ["snapshot_0.pickle", "snapshot_8.pickle"], {}
    ),
    "Megatron-LM, out of memory": Layout(
        {"snapshot_rank-0.pickle": SMALL, "snapshot_rank-1.pickle": SMALL, "snapshot_oom_rank-1.pickle": OUT},
        ["snapshot_oom_rank-1.pickle"],
        {"snapshot_oom_rank-1.pickle": {"out_of_memory": True, "rank": 1}},
    ),
    # areal/engine/megatron_engine.py
    "AReaL": Layout(
        {f"memory_snapshots/step_{s}/snapshot_rank0{r}_p0d{r}c0t0.pickle": SMALL for s in (0, 1) for r in (0, 1)},
        [f"memory_snapshots/step_1/snapshot_rank0{r}_p0d{r}c0t0.pickle" for r in (0, 1)],
        {"memory_snapshots/step_0/snapshot_rank00_p0d0c0t0.pickle": {"step": 0, "label": "p0d0c0t0"}},
    ),
    # roll/utils/context_managers.py: EXPERIMENT/TIME/WORKER/METHOD/snapshot_{time}.pickle, of rank 0 of each role
    "ROLL": Layout(
        {
            "grpo/20260112-103000/actor_train-0/train_step/snapshot_20260112_103305.pickle": SMALL,
            "grpo/20260112-103000/actor_train-0/train_step/snapshot_20260112_104411.pickle": SMALL,
            "grpo/20260112-103000/reference-0/compute_log_probs/snapshot_20260112_104400.pickle": OTHER,
        },
        ["grpo/20260112-103000/actor_train-0/train_step/snapshot_20260112_104411.pickle"],
        {
            "grpo/20260112-103000/reference-0/compute_log_probs/snapshot_20260112_104400.pickle": {
                "role": "reference",
                "rank": 0,
                "label": "compute_log_probs",
                "time": "2026-01-12 10:44:00",
            }
        },
    ),
    # lmms_engine/utils/profiler.py
    "lmms-engine": Layout(
        {
            "snapshot_stop_step_rank0.pickle": SMALL,
            "snapshot_stop_step_rank1.pickle": SMALL,
            "snapshot_oom_observer_rank1_pid77_1764200003.pickle": OUT,
        },
        ["snapshot_oom_observer_rank1_pid77_1764200003.pickle"],
        {"snapshot_oom_observer_rank1_pid77_1764200003.pickle": {"pid": 77, "time": "2025-11-26 23:33:23"}},
    ),
    # slime/utils/profile_utils.py: memory_snapshot_time{time.time()}_rank{rank}_{--memory-snapshot-path}
    "slime": Layout(
        {
            "memory_snapshot_time1764200000.123456_rank0_snapshot.pickle": SMALL,
            "memory_snapshot_time1764200000.5_rank1_snapshot.pickle": SMALL,
            "memory_snapshot_time1764203600.25_rank0_snapshot.pickle": OTHER,
        },
        [
            "memory_snapshot_time1764200000.5_rank1_snapshot.pickle",
            "memory_snapshot_time1764203600.25_rank0_snapshot.pickle",
        ],
        {"memory_snapshot_time1764200000.123456_rank0_snapshot.pickle": {"time": "2025-11-26 23:33:20"}},
    ),
    # prime-rl/trainer/utils.py: step_{N}/rank_{rank}.pickle
    "prime-rl": Layout(
        {f"step_{s}/rank_{r}.pickle": SMALL for s in (0, 1, 2) for r in (0, 1)},
        ["step_2/rank_0.pickle", "step_2/rank_1.pickle"],
        {"step_0/rank_1.pickle": {"step": 0, "rank": 1, "because": "another step (--step 0)"}},
    ),
    # nemo_rl/utils/memory_snapshot.py: oom_{tag}_rank{rank}_pid{pid}_{time}_{8 hex}.pickle
    "NeMo-RL": Layout(
        {
            "oom_train_rank0_pid77_20260112-103305_1a2b3c4d.pickle": SMALL,
            "oom_train_rank1_pid78_20260112-103305_5e6f7a8b.pickle": SMALL,
        },
        [
            "oom_train_rank0_pid77_20260112-103305_1a2b3c4d.pickle",
            "oom_train_rank1_pid78_20260112-103305_5e6f7a8b.pickle",
        ],
        {},
    ),
    # torchtitan/tools/profiler.py: step_{12 digits}[_exit]/{6 digits}_step_{N}.pickle
    "torchtitan": Layout(
        {
            "step_000000000010/000000_step_10.pickle": SMALL,
            "step_000000000010/000001_step_10.pickle": SMALL,
            "step_000000000014_exit/000001_step_14.pickle": OTHER,
        },
        ["step_000000000014_exit/000001_step_14.pickle"],
        {"step_000000000014_exit/000001_step_14.pickle": {"out_of_memory": True, "step": 14, "rank": 1}},
    ),
    "torchtitan, replicas": Layout(
        {
            "iteration_10/replica_0/rank0_memory_snapshot.pickle": SMALL,
            "iteration_10/replica_1/rank0_memory_snapshot.pickle": SMALL,
        },
        ["iteration_10/replica_1/rank0_memory_snapshot.pickle"],
        {"iteration_10/replica_0/rank0_memory_snapshot.pickle": {"label": "replica_0", "step": 10}},
    ),
    # torchtune/training/_profiler.py, beside its traces and tables
    "torchtune": Layout(
        {
            "iteration_5/rank0_memory_snapshot.pickle": SMALL,
            "iteration_10/rank0_memory_snapshot.pickle": SMALL,
        },
        ["iteration_10/rank0_memory_snapshot.pickle"],
        {"iteration_5/rank0_memory_snapshot.pickle": {"step": 5}},
    ),
    # axolotl/utils/callbacks/profiler.py: every rank writes the same name
    "Axolotl": Layout({"snapshot.pickle": SMALL}, ["snapshot.pickle"], {}),
    # sglang/srt/managers/scheduler_profiler_mixin.py: {time.time()}-TP-{rank}-memory[-STAGE].pickle
    "SGLang": Layout(
        {
            "1764200000.5-TP-0-memory-EXTEND.pickle": OUT,
            "1764200003.5-TP-0-memory-DECODE.pickle": OUT,
            "1764200003.75-TP-1-memory-DECODE.pickle": OUT,
        },
        ["1764200003.5-TP-0-memory-DECODE.pickle", "1764200003.75-TP-1-memory-DECODE.pickle"],
        {"1764200000.5-TP-0-memory-EXTEND.pickle": {"role": "rollout", "label": "extend", "role_from": "name"}},
    ),
}


def laid_out(folder: Path, files: dict[str, str], shared: Path) -> Path:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shared / "snapshots" / source, path)
    return folder


def listed(html: str) -> list[str]:
    """The dumps that the page's table lists, one for each of its rows."""
    table = html.split('id="recordings"', 1)[1].split("</section>", 1)[0]
    return re.findall(r'<th scope="row">(?:<code>)?([^<]+)', table)


@pytest.mark.parametrize("framework", LAYOUTS)
def test_every_dump_is_accounted_for_once(framework: str, shared: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[framework]
    folder, page = laid_out(tmp_path / "run", layout.files, shared), tmp_path / "page.html"
    report = report_of(folder)
    assert sorted(str(Path(r["file"]).relative_to(folder)) for r in report["ranks"]) == layout.shown
    rows = {row["file"]: row for row in report.get("recordings", [])}
    if len(layout.files) == len(layout.shown):
        assert rows == {}
        return
    assert sorted(rows) == sorted(layout.files)
    assert sorted(name for name, row in rows.items() if row["shown"]) == layout.shown
    assert all(bool(row["because"]) is not row["shown"] for row in rows.values())
    for name, says in layout.says.items():
        assert {key: rows[name][key] for key in says} == says
    result = call("report", folder, "-o", page)
    assert result.exit_code == 0
    assert sorted(listed(page.read_text(encoding="utf-8"))) == sorted(layout.files)
    markdown = call("report", folder, "--format", "markdown").stdout
    assert all(markdown.count(f"`{name}") == 1 for name in layout.files)


def test_roles_that_paths_do_not_name_are_told_by_what_they_hold(shared: Path, tmp_path: Path) -> None:
    """One rank twice: a process that trains, and one that only infers."""
    files = {"step2/torch_memory_rank0_pid10.pickle": INFERS, "step2/torch_memory_rank0_pid11.pickle": TRAINS}
    folder = laid_out(tmp_path / "run", files, shared)
    report = report_of(folder)
    rows = {row["pid"]: row for row in report["recordings"]}
    assert (rows[11]["role"], rows[11]["role_from"], rows[11]["shown"]) == ("actor", "content", True)
    assert rows[10]["shown"] is False
    assert rows[10]["peak_bytes"] > 0  # it was read, and its figure stands beside the other's
    assert any("by their contents" in note for note in report["notes"])
    assert call("report", folder, "--role", "critic").exit_code == 2


def test_a_role_and_a_step_can_be_asked_for(tmp_path: Path) -> None:
    """As ``memprof.attach`` writes them: a folder for each role."""
    for role, more in (("actor", 10), ("rollout", 2)):
        for rank in (0, 1):
            record(tmp_path / role / f"step-000004.rank-{rank}.pickle", more + 2 * rank, rank=rank, world_size=2)
    assert [r["peak"]["active_bytes"] for r in report_of(tmp_path)["ranks"]] == [14 * MIB, 16 * MIB]
    report = report_of(tmp_path, "--role", "rollout")
    assert [r["peak"]["active_bytes"] for r in report["ranks"]] == [6 * MIB, 8 * MIB]
    assert {row["file"]: row["because"] for row in report["recordings"]} == {
        "actor/step-000004.rank-0.pickle": "another role (--role actor)",
        "actor/step-000004.rank-1.pickle": "another role (--role actor)",
        "rollout/step-000004.rank-0.pickle": None,
        "rollout/step-000004.rank-1.pickle": None,
    }
    missing = call("report", tmp_path, "--role", "reward")
    assert (missing.exit_code, "dumps of actor, rollout" in missing.stderr) == (2, True)
    single = call("report", tmp_path / "actor" / "step-000004.rank-0.pickle", "--role", "actor")
    assert (single.exit_code, "give one folder" in single.stderr) == (2, True)


@pytest.mark.parametrize("row", [row for _, row in layouts()], ids=lambda row: row.framework)
def test_a_layouts_example_says_what_its_row_says(row: DumpLayout) -> None:
    """Each row of the table, and no earlier row takes its example."""
    said: dict[str, Any] = {"out_of_memory": row.out_of_memory, **row.says}
    assert dump_name(Path(row.example)) == DumpName(**said)


@pytest.mark.parametrize(("damage", "says"), [(b"", "the file is empty"), (b"memray\0...", "memray"), (None, "cut")])
def test_one_dump_that_cannot_be_read_is_named_and_the_rest_is_read(
    damage: bytes | None, says: str, shared: Path, tmp_path: Path
) -> None:
    name = "memory_snapshot_time1764200000.5_rank{}_snapshot.pickle"
    folder = laid_out(tmp_path / "run", {name.format(r): SMALL for r in (0, 1, 2)}, shared)
    bad = folder / name.format(1)
    bad.write_bytes(bad.read_bytes()[:4000] if damage is None else damage)
    report = report_of(folder)
    assert [r["rank"] for r in report["ranks"]] == [0, 2]
    (note,) = [n for n in report["notes"] if n.startswith("Left out")]
    assert bad.name in note
    rows = {row["rank"]: row for row in report["recordings"]}
    assert rows[1]["because"].startswith("cannot be read: ")
    assert damage is None or says in note
    assert str(folder) not in rows[1]["because"]  # the row names the file
    screen = call("report", folder).stdout
    assert bad.name in "".join(screen.split())
    assert screen.partition("\nDump ")[2].splitlines()[0].split() == ["Rank", "Role,", "process", "GiB", "Here"]


def test_an_empty_dump_of_the_failure_leaves_the_step_before_it(shared: Path, tmp_path: Path) -> None:
    """A process that dies while it dumps leaves an empty file where the best one should be."""
    empty = "oom_20260112-103305-123456/torch_memory_oom_rank0_pid100.pickle"
    folder = laid_out(tmp_path / "run", {"step3/torch_memory_rank0_pid100.pickle": SMALL, empty: SMALL}, shared)
    (folder / empty).write_bytes(b"")
    report = report_of(folder)
    assert [Path(r["file"]).parent.name for r in report["ranks"]] == ["step3"]
    assert any(empty in note for note in report["notes"])
    (folder / "step3/torch_memory_rank0_pid100.pickle").write_bytes(b"")
    result = call("report", folder)
    assert (result.exit_code, "is empty" in result.stderr) == (3, True)


def test_a_folder_with_one_pickle_of_any_name_is_read(tmp_path: Path) -> None:
    record(tmp_path / "one" / "dump.pickle", 2)
    assert [r["peak"]["active_bytes"] for r in report_of(tmp_path / "one")["ranks"]] == [6 * MIB]
    record(tmp_path / "one" / "other.pickle", 2)
    result = call("report", tmp_path / "one")
    assert (result.exit_code, "the 2 pickles there say no rank" in result.stderr) == (3, True)


def test_a_damaged_dump_and_a_stranger_are_named(tmp_path: Path) -> None:
    record(tmp_path / "step3" / "torch_memory_rank0_pid1.pickle", 2)
    (tmp_path / "step3" / "torch_memory_rank0_pid2.pickle").write_bytes(b"cut off")
    (tmp_path / "dataset.pickle").write_bytes(b"not ours")
    report = report_of(tmp_path)
    rows = {row["pid"]: row for row in report["recordings"]}
    assert rows[1]["shown"] is True
    assert rows[2]["because"].startswith("cannot be read: ")
    assert any("dataset.pickle" in note for note in report["notes"])


def test_a_link_is_not_followed_and_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        record(tmp_path / "step3" / f"torch_memory_rank{rank}_pid1.pickle", 2)
    (tmp_path / "step3" / "torch_memory_rank7_pid9.pickle").symlink_to("torch_memory_rank0_pid1.pickle")
    report = report_of(tmp_path)
    assert "recordings" not in report  # both are shown, so no table says which is not
    assert any("links are not followed: step3/torch_memory_rank7_pid9.pickle." in note for note in report["notes"])


def test_two_files_of_one_rank_are_refused_by_name(tmp_path: Path) -> None:
    files = [record(tmp_path / f"torch_memory_rank0_pid{pid}.pickle", pid) for pid in (1, 2)]
    result = call("report", *files)
    assert result.exit_code == 3
    assert all(file.name in result.stderr for file in files)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("model.pickle", None),
        ("optimizer.pkl", None),
        ("memory_snapshot.pickle", DumpName()),
        ("critic/step_7/rank_3.pickle", DumpName(3, 7, "critic")),
        ("ref_rank12_pid9.pickle", DumpName(12, None, "reference", 9)),
        ("mem_rank_3.pickle", DumpName(3)),
        ("franken3.pickle", None),
        ("stepping/prefix_rank4.pickle", DumpName(4)),
    ],
)
def test_what_a_path_says(path: str, says: DumpName | None) -> None:
    assert dump_name(Path(path)) == says
