"""The numbers of a message: what they add up to, and which of them is the trouble."""

from __future__ import annotations

import pytest
from memprof.reports.renderers import draw

from memprof.oom.explain import explain_log
from memprof.report.oom import ExplainedFailure
from tests.oom.wordings import gib, mib


def message(
    asked: str = "2.00 GiB",
    free: str | None = "1.00 GiB",
    total: str = "24.00 GiB",
    used: str | None = None,
    allocated: str | None = None,
    cached: str | None = None,
    processes: str = "",
    allowed: str = "",
    backend: str = "CUDA",
) -> str:
    text = f"{backend} out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total}"
    text += f" of which {free} is free. " if free is not None else ". "
    text += f"{allowed} allowed; " if allowed else ""
    text += processes
    text += f"Including non-PyTorch memory, this process has {used} memory in use. " if used else ""
    text += f"Of the allocated memory {allocated} is allocated by PyTorch, " if allocated else ""
    return text + (f"and {cached} is reserved by PyTorch but unallocated." if cached else "")


def explained(text: str) -> ExplainedFailure:
    (failure,) = explain_log(text).failures
    return failure


CAUSES: dict[str, tuple[str, str, str]] = {
    "nothing idle": ("full", "full", message(used="22.9 GiB", allocated="22.40 GiB", cached="100.00 MiB")),
    "idle enough": (
        "fragmentation",
        "fragmentation",
        message(used="22.9 GiB", allocated="18.0 GiB", cached="4.50 GiB"),
    ),
    "idle enough with what is free": (
        "fragmentation",
        "fragmentation",
        message(used="22.9 GiB", allocated="21.0 GiB", cached="1.40 GiB"),
    ),
    "idle, but all else is live": (
        "full",
        "full_with_gaps",
        message("100.00 MiB", "10.00 MiB", used="23.9 GiB", allocated="23.40 GiB", cached="300.00 MiB"),
    ),
    "gaps that every run has": (
        "full",
        "full_with_gaps",
        message("20.00 MiB", "0 bytes", "6.00 GiB", allocated="5.24 GiB", cached="51.20 MiB"),
    ),
    "a limit counts what is reserved": (
        "limit",
        "limit",
        message("1.00 GiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="2.80 GiB", allowed="8.00 GiB"),
    ),
    "a limit counts the piece that torch takes": (
        "limit",
        "limit",
        message("8.31 MiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="2.97 GiB", allowed="8.00 GiB"),
    ),
    "a limit counts the segment of the size that was set": (
        "limit",
        "limit",
        "PYTORCH_CUDA_ALLOC_CONF=large_segment_size_mb:64 python train.py\n"
        + message("2.00 MiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="2.95 GiB", allowed="8.00 GiB"),
    ),
    "a limit counts the segment of the size that was set in a text with spaces": (
        "limit",
        "limit",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:128, large_segment_size_mb: 64'\n"
        + message("2.00 MiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="2.95 GiB", allowed="8.00 GiB"),
    ),
    "settings after a variable that is set to nothing do not count": (
        "refused",
        "refused",
        "export PYTORCH_CUDA_ALLOC_CONF=\nexport PYTORCH_ALLOC_CONF=large_segment_size_mb:64\n"
        + message("2.00 MiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="2.95 GiB", allowed="8.00 GiB"),
    ),
    "within a limit": (
        "refused",
        "refused",
        message("1.00 GiB", "10.00 GiB", "80.00 GiB", allocated="5.00 GiB", cached="1.80 GiB", allowed="8.00 GiB"),
    ),
    "free memory refused": (
        "refused",
        "refused",
        message(free="3.00 GiB", used="21.0 GiB", allocated="20.0 GiB", cached="0.10 GiB"),
    ),
    "outside torch": (
        "outside_torch",
        "outside_torch",
        message(used="23.0 GiB", allocated="15.00 GiB", cached="100.00 MiB"),
    ),
    "a context and NCCL are no cause": (
        "full",
        "full",
        message("1.50 GiB", "1.00 GiB", "79.00 GiB", "78.00 GiB", "75.00 GiB", "0.30 GiB"),
    ),
    "listed processes are added up": (
        "other_processes",
        "other_processes",
        message(
            used="8.0 GiB",
            allocated="7.00 GiB",
            cached="0.50 GiB",
            processes="Process 7 has 0.60 GiB memory in use. Process 8 has 0.70 GiB memory in use. ",
        ),
    ),
    "others outweigh a small cache": (
        "other_processes",
        "other_processes",
        message(
            "20.00 MiB",
            "10.00 MiB",
            used="5.6 GiB",
            allocated="5.00 GiB",
            cached="30.00 MiB",
            processes="Process 7 has 18.39 GiB memory in use. ",
        ),
    ),
    "nobody is named": ("unexplained", "unexplained", message(allocated="5.00 GiB", cached="100.00 MiB")),
    "named, but without figures": (
        "other_processes",
        "ranks_on_one_device",
        message(
            "130.00 MiB",
            "12.81 MiB",
            "79.10 GiB",
            "0 bytes",
            "10.47 GiB",
            "93.52 MiB",
            "Process 31 has 0 bytes memory in use. Process 32 has 0 bytes memory in use. ",
        ),
    ),
    "larger than the card": (
        "larger_than_device",
        "larger_than_device",
        message("74.16 GiB", used="3.0 GiB", allocated="2.0 GiB", cached="0.10 GiB"),
    ),
    "above an exabyte": (
        "larger_than_device",
        "overflow",
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
    ),
    "XPU, one large block": (
        "refused",
        "xpu_single_allocation",
        message("8.00 GiB", None, "15.11 GiB", allocated="0 bytes", cached="0 bytes", backend="XPU"),
    ),
    "XPU, full": (
        "full",
        "full",
        message("8.00 GiB", "0.20 GiB", "15.11 GiB", allocated="14.80 GiB", cached="0.10 GiB", backend="XPU"),
    ),
    "half a card is missing, free not told": (
        "unexplained",
        "unexplained",
        "XPU out of memory. Tried to allocate 64.00 MiB (GPU 0; 15.91 GiB total capacity; 7.22 GiB already allocated; "
        "7.36 GiB reserved in total by PyTorch)",
    ),
    "MPS, others": (
        "limit",
        "mps_watermark",
        "MPS backend out of memory (MPS allocated: 11.14 GB, other allocations: 6.65 GB, max allowed: 18.13 GB). "
        "Tried to "
        "allocate 375.40 MB on private pool.",
    ),
    "MPS, at the limit but for rounding": (
        "limit",
        "mps_watermark",
        "MPS backend out of memory (MPS allocated: 9.56 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
        "Tried to allocate 292.50 MiB on private pool.",
    ),
    "Metal's largest buffer": ("larger_than_device", "metal_buffer", "RuntimeError: Invalid buffer size: 44.20 GiB"),
    "the first line is cut off": (
        "full",
        "request_cut_off",
        "of which 15.56 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB memory in use. Of the "
        "allocated "
        "memory 22.90 GiB is allocated by PyTorch, and 241.00 MiB is reserved by PyTorch but unallocated.",
    ),
    "no figures": ("unknown", "no_numbers", "RuntimeError: CUDA out of memory."),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause(name: str) -> None:
    cause, reason, text = CAUSES[name]
    failure = explained(text)
    assert (failure.cause, failure.reason) == (cause, reason), failure.because


def test_what_nobody_is_named_for_is_not_other_processes() -> None:
    failure = explained(CAUSES["nobody is named"][2])
    assert failure.other_processes_bytes is None
    assert failure.unexplained_bytes == gib(24) - gib(1) - gib(5) - mib(100)
    assert "unaccounted" in {row.name for row in failure.numbers}


def test_listed_processes_are_added_up_and_taken_off() -> None:
    failure = explained(CAUSES["listed processes are added up"][2])
    assert failure.other_processes_bytes == gib(0.6) + gib(0.7)
    assert failure.unexplained_bytes == gib(24) - gib(1) - gib(8) - gib(0.6) - gib(0.7)


def test_figures_that_contradict_torch_are_reported_and_not_used() -> None:
    answer = explain_log(CAUSES["named, but without figures"][2])
    (failure,) = answer.failures
    assert len(failure.contradictions) == 1
    assert "0 B in use" in failure.contradictions[0]
    assert failure.in_use_bytes is None
    assert failure.sum is None
    assert "Contradiction: the driver says" in draw("oom", answer)


@pytest.mark.parametrize("who", ["Process 12 has", "Including non-PyTorch memory, this process has"])
def test_figures_above_any_device_are_reported_and_not_used(who: str) -> None:
    text = message(processes=f"{who} 17179869184.00 GiB memory in use. ", allocated="20.00 GiB", cached="0.10 GiB")
    failure = explained(text)
    assert "above any device" in failure.contradictions[0]
    assert failure.in_use_bytes is None
    assert failure.other_processes_bytes is None


def test_free_memory_above_the_whole_device_is_reported_and_not_used() -> None:
    """An AMD card whose memory is the host's answers with 2^64 bytes."""
    text = message(total="512.00 MiB", free="17179869184.00 GiB", allocated="243.69 MiB", cached="20.31 MiB")
    failure = explained(text)
    assert "above the whole device" in failure.contradictions[0]
    assert failure.device_free_bytes is None
    assert failure.cause != "refused"


def test_this_process_is_found_among_those_named_in_a_container() -> None:
    text = message(processes="Process 41 has 22.80 GiB memory in use. ", allocated="22.00 GiB", cached="0.30 GiB")
    failure = explained(text)
    assert failure.in_use_bytes == gib(22.8)
    assert failure.processes == ()
    assert failure.cause == "full"


def test_without_torchs_own_figures_a_lone_process_may_be_this_one() -> None:
    text = message(processes="Process 41 has 23.00 GiB memory in use.").removesuffix("Of the allocated memory ")
    assert explained(text).cause != "other_processes"


def test_every_sum_is_what_its_parts_add_up_to() -> None:
    for _, _, text in CAUSES.values():
        failure = explained(text)
        if failure.sum is None:
            continue
        parts = failure.allocated_bytes + failure.cached_bytes + failure.outside_torch_bytes
        assert abs(parts - failure.in_use_bytes) <= mib(1)
