"""Texts as they reach a tool: broken, prefixed, boxed, marked up, interleaved, repeated, shortened."""

from __future__ import annotations

import html
import json
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log
from memprof.oom.reading.find import find_failures
from memprof.oom.reading.regions import regions
from tests.oom.wordings import EXAMPLES, WORDINGS, gib, mib

FULL = WORDINGS["2.4, private pools"].text
SAYS = WORDINGS["2.4, private pools"].says


def traceback_of(rank: int) -> str:
    return (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    loss.backward()\n'
        '  File "/usr/lib/site-packages/torch/_tensor.py", line 581, in backward\n    torch.autograd.backward(\n'
        + FULL.replace("GPU 3", f"GPU {rank}").replace("Tried to allocate 2.00", f"Tried to allocate 2.0{rank}")
    )


@pytest.mark.parametrize("width", [40, 61, 80, 97, 132])
def test_a_message_broken_inside_words_and_numbers(width: int) -> None:
    broken = "\n".join(FULL[i : i + width] for i in range(0, len(FULL), width))
    (failure,) = find_failures(broken)
    assert {key: getattr(failure, key) for key in SAYS} == SAYS


@pytest.mark.parametrize("prefix", ["| ", "[rank3]: ", "3: ", "[1,3]<stderr>: ", "(Worker_TP3 pid=1) ", "SUBPROCESS: "])
def test_a_message_broken_inside_words_with_a_prefix_on_each_line(prefix: str) -> None:
    broken = "\n".join(prefix + FULL[i : i + 70] for i in range(0, len(FULL), 70))
    (failure,) = find_failures(broken)
    assert {key: getattr(failure, key) for key in SAYS} == SAYS
    assert failure.rank == (None if prefix in ("| ", "SUBPROCESS: ") else 3)


def test_a_rich_box() -> None:
    rows = [f"│ {line:<76} │" for line in textwrap.wrap(FULL, 76)]
    boxed = "\n".join(["╭" + "─" * 30 + " Traceback " + "─" * 37 + "╮", *rows, "╰" + "─" * 78 + "╯"])
    (failure,) = find_failures(boxed)
    assert {key: getattr(failure, key) for key in SAYS} == SAYS


def test_a_notebooks_html() -> None:
    text = (
        '<div class="output"><pre><span class="ansi-red-fg">OutOfMemoryError</span>: '
        + html.escape(FULL)
        + "</pre></div>"
    )
    (failure,) = find_failures(text)
    assert {key: getattr(failure, key) for key in SAYS} == SAYS


def test_a_notebooks_file() -> None:
    cell = {
        "ename": "OutOfMemoryError",
        "evalue": FULL,
        "traceback": ["\x1b[0;31m-----\x1b[0m", f"\x1b[0;31mOutOfMemoryError\x1b[0m: {FULL}"],
    }
    (failure,) = find_failures(json.dumps(cell))
    assert failure.total == gib(79.11)


def test_interleaved_ranks_are_read_apart_and_counted_once_each() -> None:
    columns = [traceback_of(rank).split("\n") for rank in range(4)]
    mixed = "\n".join(f"[rank{rank}]: {line}" for row in zip(*columns, strict=True) for rank, line in enumerate(row))
    answer = explain_log(mixed + "\n" + mixed)
    (event,) = answer.failures
    assert event.phase == "backward"
    assert event.requested_bytes == gib(2)
    found = [(row.rank, row.device, row.requested_bytes) for row in event.ranks]
    assert found == [(r, r, gib(2 + r / 100)) for r in range(4)]
    assert "rank 0 (likewise ranks 1, 2, 3)" in draw("oom", answer)
    assert "4 ranks" in answer.notes[0]
    # The rank that asked for most, of equally full devices, was missing most.
    assert "rank 3 first" in answer.notes[0]


def of_rank(rank: int, size: str = "2.00", file: str = "train.py") -> str:
    told = traceback_of(rank).replace(f"2.0{rank}", size).replace("train.py", file)
    return "".join(f"[rank{rank}]: {line}\n" for line in told.split("\n"))


def test_a_rank_that_fails_again_or_elsewhere_has_an_event_of_its_own() -> None:
    again = explain_log(of_rank(0) + of_rank(1) + of_rank(0, "3.00")).failures
    assert [[row.rank for row in event.ranks] for event in again] == [[0, 1], [0]]
    elsewhere = explain_log(of_rank(0) + of_rank(1, file="serve.py")).failures
    assert [[row.rank for row in event.ranks] for event in elsewhere] == [[0], [1]]


def test_a_worker_and_the_driver_that_raises_again_count_once() -> None:
    log = (
        "(WorkerDict pid=1234) "
        + traceback_of(1).replace("\n", "\n(WorkerDict pid=1234) ")
        + "\nray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor() (pid=1234, ip=10.0.0.1)\n"
        + traceback_of(1)
    )
    assert len(explain_log(log).failures) == 1


def test_an_engines_message_takes_in_the_one_that_caused_it() -> None:
    log = (
        f"{traceback_of(1)}\n\nThe above exception was the direct cause of the following exception:\n\n"
        + EXAMPLES["vllm.sampler_warmup"].text
    )
    (failure,) = explain_log(log).failures
    assert failure.form == "vllm.sampler_warmup"
    assert failure.requested_bytes == gib(2.01)


def test_a_line_of_code_is_not_a_second_failure() -> None:
    log = '  File "worker.py", line 493, in check\n    raise ValueError("No available memory for the cache blocks. "\n'
    assert len(find_failures(log + EXAMPLES["vllm.no_cache_blocks"].text)) == 1
    assert len(find_failures(log)) == 1  # all there is


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("OOM: tried to allocate 3.2GB, only 1.1GB free of 24GB", {"requested": gib(3.2), "free": gib(1.1)}),
        (
            "Tried to allocate 6.20 GiB. GPU 2 has total 47.40 GiB of which 1.96 GiB is free.",
            {"requested": gib(6.2), "total": gib(47.4), "free": gib(1.96), "device": 2},
        ),
        (
            "CUDA OOM at step 12. Tried to allocate 2.50 GiB (GPU 1; 39.59 GiB total; 35.1 GiB already allocated; 1.8 "
            "GiB free)",
            {"requested": gib(2.5), "device": 1, "total": gib(39.59), "allocated": gib(35.1), "free": gib(1.8)},
        ),
        (
            "CUDA out of memory ... 77.20 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but "
            "unallocated",
            {"allocated": gib(77.2), "unallocated": gib(1.2), "requested": None},
        ),
        (
            "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            "Currently allocated     : 5.26 GiB\nRequested               : 20.00 MiB\n"
            "Device limit            : 8.00 GiB\nFree (according to CUDA): 0 bytes",
            {"requested": mib(20), "allocated": gib(5.26), "total": gib(8), "free": 0},
        ),
    ],
)
def test_shortened_by_hand_and_cut(text: str, says: dict[str, object]) -> None:
    (failure,) = find_failures(text)
    assert {key: getattr(failure, key) for key in says} == says


def test_several_failures_of_different_kinds_are_all_told() -> None:
    log = "\n".join(
        EXAMPLES[name].text for name in ("vllm.no_cache_blocks", "nccl.alloc", "kernel.machine", "shm.dataloader")
    )
    assert [f.form for f in explain_log(log).failures] == [
        "vllm.no_cache_blocks",
        "nccl.alloc",
        "kernel.machine",
        "shm.dataloader",
    ]


def test_the_line_that_is_named_is_the_one_in_the_log() -> None:
    assert find_failures("a\n\nb\n[rank0]: c\n" + FULL)[0].line == 5


# -- time ------------------------------------------------------------------------------------------------------

ATOMS = [
    "CUDA out of memory. ",
    "Tried to allocate ",
    "9" * 40,
    " GiB",
    "is free. ",
    "Process 1 has ",
    'File "',
    '", line 1, in f\n',
    "(",
    "[rank0]: ",
    "\n",
    " ",
    "│ ",
    "<span>",
    "&lt;",
    "\x1b[31m",
    "memory used=",
    "where the task (",
    "max seq len (",
    "out of memory ",
    "killed ",
    "-9",
    "error ",
    "/dev/shm/nccl-",
    "a" * 60,
    "Traceback (most recent call last):\n",
    ": ",
    "1,",
    "Worker exit type: ",
    "total-vm:",
    "local_rank=",
    "\\n",
    "\\u001b[",
    "| ",
    "/a.py",
    ":12 in f",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(ATOMS), min_size=1, max_size=6), st.integers(1, 4000))
def test_pieces_repeated_without_end_are_drawn(parts: list[str], times: int) -> None:
    """What makes an expression backtrack ends in an answer too; `benchmarks.oom growth` times it."""
    text = ("".join(parts) * times)[:100_000]
    answer = explain_log(text)
    draw("oom", answer)
    draw("oom", answer, "markdown")


NOISE = "2026-11-20 step 17 | loss 0.123 | Process 12 has nothing | 3.00 GiB of something ; CUDA out of luck\n"
ENGINE_NOISE = (
    "(EngineCore pid=12) INFO 11-20 10:00:00 [loggers.py:257] Engine 000: GPU KV cache usage: 3.1%, waiting: 0 reqs\n"
)


# The last two make one line of any length.
NOISES = [
    NOISE, ENGINE_NOISE, "CUDA out of memory, trying again\n", "Killed\n", "a" * 5000 + "\n", "x ",
    '{"log":"memory 12.3 GiB allocated by trainer, killed ","time":"2025"}, ',
]  # fmt: skip
# Read closely of a log of any length: the head, the tail, and what stands around each end of them.
CLOSELY = 1_000_000


@pytest.mark.parametrize("noise", NOISES)
def test_of_a_log_that_grows_no_more_is_read_closely(noise: str) -> None:
    """Counted in characters; what is left over is searched for plain words only."""
    read = []
    for size in (2_000_000, 8_000_000):
        log = noise * (size // len(noise)) + FULL
        parts = list(regions(log, []))
        read.append(sum(len(part) for _, part in parts))
        assert any(part.endswith(FULL) for _, part in parts)
    assert read[1] <= max(read[0], CLOSELY) <= CLOSELY


@pytest.mark.heavy
@pytest.mark.parametrize("noise", NOISES)
def test_a_message_at_the_end_of_a_long_log_is_found(noise: str) -> None:
    failures = find_failures(noise * (5_000_000 // len(noise)) + FULL)
    assert any(failure.total == gib(79.11) for failure in failures)


def test_what_is_not_read_closely_is_said() -> None:
    answer = explain_log("CUDA out of memory, trying again\n" * 200_000)
    assert any("were read closely" in note for note in answer.notes)
