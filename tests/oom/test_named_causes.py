"""Answers to programs that name their own limit: what they say decides, and so does what the paste shows already."""

from __future__ import annotations

import pytest

from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure


def only(text: str) -> ExplainedFailure:
    (failure,) = explain_log(text).failures
    return failure


@pytest.mark.parametrize("word", ["被杀死", "強制終了しました", "强制终止", "Asesinado", "Matado", "Morto", "Getötet"])
@pytest.mark.parametrize(
    "line", ["{}", "go.sh: línea 7: 41922 {}        python sft.py --bf16", "go.sh：行 7：  41922 {}     python sft.py"]
)
def test_killed_in_the_shells_language(word: str, line: str) -> None:
    assert only(f"loading shards: 50%\n{line.format(word)}\n").cause == "killed"


HOST = [
    (
        "WARN TaskSetManager: ExecutorLostFailure Reason: Container killed by YARN for exceeding memory "
        "limits. 22.3 GB of 22 GB physical memory used.",
        "22.30 GiB of 22.00 GiB",
        "memoryOverhead",
    ),
    (
        "systemd-oomd[812]: Killed /user.slice/vte-spawn-5e.scope due to memory pressure for "
        "/user.slice/user-1000.slice being 62.31% > 50.00% for > 20s with reclaim activity\n"
        "systemd[1888]: vte-spawn-5e.scope: systemd-oomd killed 24 process(es) in this unit.",
        "62.31 %, above its limit of 50 %",
        "oomctl",
    ),
    (
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n    Limits:\n"
        "      cpu:             8\n      memory:          64Gi\n      nvidia.com/gpu:  1\n",
        "limit of 64.00 GiB",
        "raise resources.limits.memory above 64.00 GiB",
    ),
    (
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\nExited with exit code 130.\n\n"
        "    CPU time :       412.55 sec.\n    Max Memory :     32768 MB\n    Average Memory :     19422.31 MB\n",
        "at most 32.00 GiB",
        "LSF -M",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "because", "first"), HOST, ids=["yarn", "oomd", "pod", "lsf"])
def test_whoever_ended_the_process_is_named_with_its_figures(text: str, because: str, first: str) -> None:
    failure = only(text)
    assert failure.cause == "killed"
    assert because in failure.because
    assert "kernel killed" not in failure.because
    assert first in failure.suggestions[0].action


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RuntimeError: unable to open shared memory object </torch_2391_44120_301> in read-write mode: Too many open "
         "files (24)", "open files"),
        ("ResourceExhausted: 429 RESOURCE_EXHAUSTED. You exceeded your current quota", "quota"),
        ("error: *** JOB 55 ON gpu-17 CANCELLED AT 2025-09-30T04:00:21 DUE TO TIME LIMIT ***\n"
         "srun: error: gpu-17: task 0: Killed", "time limit"),
    ],
    ids=["files", "quota", "time"],
)  # fmt: skip
def test_what_is_no_lack_of_memory_is_named(text: str, says: str) -> None:
    explained = explain_log(text)
    assert explained.failures == ()
    assert any(says in note for note in explained.notes)
