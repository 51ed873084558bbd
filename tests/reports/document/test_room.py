"""How far a run was from out of memory: the bar's parts, the card, and where it is known from."""

from __future__ import annotations

import re
from typing import Any

from memprof.reports.document.build import oom_sentence
from memprof.reports.document.model import Room
from memprof.reports.html.report import render_html

from memprof.analysis.report import capacity_of
from memprof.report.codec import to_builtins
from memprof.report.run import Capacity, OutOfMemory
from memprof.snapshot.recorded_run import RecordedDevice
from tests.reports.document.drawn import render_markdown, render_terminal
from tests.reports.sample import MIB, PEAK, sample
from tests.reports.typed import build_document, room_of, typed

CARD = 25_386_352_640  # of the sample: 24,210 MiB
HELD = sum(PEAK.values())
RESERVED = HELD + 900 + 120 + 200


def parts(room: Room | None) -> dict[str, int]:
    assert room is not None
    assert sum(p.bytes for p in room.parts) <= room.scale_bytes
    return {p.id: p.bytes // MIB for p in room.parts}


def ran_out(**more: Any) -> dict[str, Any]:
    report = sample()[0]
    report["oom"] = {
        "requested_bytes": 900 * MIB, "device_free_bytes": 500 * MIB, "phase": "backward", "step": 1, "stack": [],
        "allocated_bytes": 6000 * MIB, "reserved_bytes": 7000 * MIB, "categories": {"weights": 6000 * MIB},
        "cached_bytes": 600 * MIB, "inactive_split_bytes": 400 * MIB, "fits_defragmented": True, **more,
    }  # fmt: skip
    return report


def test_the_device_peak_and_what_was_left() -> None:
    room = room_of(sample()[0])
    assert parts(room) == {
        "held": HELD, "cached": RESERVED - HELD, "non_torch": 480, "free": 24_210 - RESERVED - 480,
    }  # fmt: skip
    assert room is not None
    assert room.sentence == "15.20 GiB left of 23.64 GiB (the GPU), 64%."


def test_a_card_that_is_asked_about() -> None:
    report = {**sample()[0], "capacity": {"bytes": 8000 * MIB, "from": "option"}}
    room = room_of(report)
    assert parts(room) == {"held": HELD, "cached": RESERVED - HELD, "non_torch": 480}
    assert room is not None
    assert room.sentence == "8.44 GiB, 0.63 more than 7.81 GiB (the GPU given)."
    text = render_terminal(build_document(report), 80)
    bar = next(line for line in text.split("\n") if line.startswith("HHH"))
    assert abs(bar.index("¦") - round(79 * 8000 / (RESERVED + 480))) <= 1


def test_little_room_on_a_card_that_is_asked_about_is_not_all_the_runs() -> None:
    """The allocator's figures alone: a context takes more than what is left."""
    report = {**sample()[0], "capacity": {"bytes": (RESERVED + 70) * MIB, "from": "option"}}
    report["device_peak"] = {**report["device_peak"], "non_torch_bytes": None}
    room = room_of(report)
    assert room is not None
    assert room.sentence.endswith(
        "0.9%. Non-PyTorch memory was not measured: a CUDA context uses about 0.6 GiB, more than that."
    )
    report["capacity"] = {"bytes": (RESERVED + 5000) * MIB, "from": "option"}
    room = room_of(report)
    assert room is not None
    assert room.sentence.endswith("%.")


def test_a_request_that_failed_on_a_card_that_is_known() -> None:
    """24,210 MiB less 500 free less 7,000 reserved are outside torch."""
    room = room_of(ran_out())
    assert parts(room) == {"held": 6000, "cached": 1000, "non_torch": 16_710, "request": 900}
    assert room is not None
    assert room.sentence == "24.03 GiB with the 900.00 MiB that failed, 0.39 more than 23.64 GiB (the GPU)."


def test_free_bytes_give_the_card_where_nothing_else_does() -> None:
    report = ran_out()
    report["source"]["device_total_bytes"] = None
    oom = typed(report["oom"], OutOfMemory)
    capacity = capacity_of(RecordedDevice(), oom)
    assert capacity == Capacity(bytes=7500 * MIB, source="oom")
    assert capacity is not None
    report["capacity"] = to_builtins(capacity)
    room = room_of(report)
    assert room is not None
    assert room.capacity_bytes == 7500 * MIB
    assert "the GPU at least" in room.sentence
    assert capacity_of(RecordedDevice(total_bytes=CARD), oom) == Capacity(bytes=CARD, source="device")
    assert capacity_of(RecordedDevice(), None) is None


def test_a_tensor_trace_is_asked_about_a_card_and_says_what_it_lacks() -> None:
    report = sample("trace")[0]
    assert room_of(report) is None
    machine = capacity_of(RecordedDevice(type="cpu", total_bytes=8000 * MIB), None)
    assert machine is not None
    room = room_of({**report, "capacity": to_builtins(machine)})
    assert room is not None
    assert room.sentence.startswith("1.03 GiB left of 7.81 GiB (this machine's memory), 13%.")
    room = room_of({**report, "capacity": {"bytes": 8000 * MIB, "from": "option"}})
    assert parts(room) == {"held": HELD, "free": 8000 - HELD}
    assert room is not None
    assert room.sentence.endswith("allocator overhead and the CUDA context are not included on CPU.")


def test_terminal_markdown_and_page_say_the_same() -> None:
    document = build_document(ran_out())
    assert document.room is not None
    words = document.room.sentence
    terminal = re.sub(r"\s+", " ", render_terminal(document, 72))
    assert words in terminal
    assert words in render_html(document)
    assert words in render_markdown(document).replace("\\", "")


def test_figures_of_a_run_with_pending_frees_say_why_they_differ() -> None:
    document = build_document(*sample(pending_mib=64))
    assert "6.72 GiB" in render_terminal(document, 80)
    assert document.headline.cause.endswith(
        "0.06 GiB more were freed by the program and wait for a stream: phases, shares and the total, 6.78 GiB, count "
        "them."
    )


def test_the_sentence_looks_ahead_and_names_the_piece() -> None:
    ahead = {
        "still": {"optimizer_state": 850 * MIB}, "moment": "optimizer_step", "needed_bytes": 7000 * MIB,
        "available_bytes": 6500 * MIB, "short_bytes": 500 * MIB,
    }  # fmt: skip
    report = ran_out(
        requested_bytes=8_713_000, device_free_bytes=10 * MIB, segment_bytes=20 * MIB, fits_defragmented=None,
        ahead=ahead,
    )  # fmt: skip
    found = build_document(report).report.oom
    assert found is not None
    room = room_of(report)
    assert room is not None
    assert room.sentence.endswith("For the whole step 500.00 MiB were missing.")
    assert oom_sentence(found) == (
        "Out of memory in backward, step 1: 8.31 MiB were asked for, which needs 20.00 MiB of contiguous memory, 10.00 "
        "MiB were free on the device. The step had still to allocate 850.00 MiB of optimizer state in addition to "
        "6.01 GiB: 6.84 GiB in total, 500.00 MiB more than there was."
    )
