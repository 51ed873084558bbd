"""The truth cases: closed forms of the big models hold, and the truth's sums are the snapshot's."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

torch = pytest.importorskip("torch")

from benchmarks.truth.cases import CASES  # noqa: E402
from benchmarks.truth.models import scale_for  # noqa: E402
from benchmarks.truth.replay.emit import Stream, Variant, replay  # noqa: E402
from benchmarks.truth.replay.heap import MIB, Heap, HeapFull  # noqa: E402
from benchmarks.truth.replay.variants import live_peak, to_length  # noqa: E402
from benchmarks.truth.run import run_case  # noqa: E402
from benchmarks.truth.trace.nano import nano_parameters  # noqa: E402

LAYERS = 2


def walk(snapshot: dict[str, Any], device: int) -> tuple[list[dict[int, int]], list[int]]:
    """Live {address: bytes} and their sum after each entry, walking back from the final blocks."""
    live = {b["address"]: b["requested_size"] for s in snapshot["segments"] for b in s["blocks"]
            if s["device"] == device and b["state"] == "active_allocated"}
    states, totals = [], []
    for entry in reversed(snapshot["device_traces"][device]):
        states.append(dict(live))
        totals.append(sum(live.values()))
        if entry["action"] == "alloc":
            assert live.pop(entry["addr"]) == entry["size"]
        elif entry["action"] == "free_completed":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
    return states[::-1], totals[::-1]


def check(snapshot: dict[str, Any], truth: dict[str, Any]) -> None:
    """Every list of the truth is exactly what the snapshot holds at that entry, and the peak is the peak."""
    states, totals = walk(snapshot, truth["device"])
    for shot in [truth["peak"], *filter(None, truth["phases"].values())]:
        assert {row[0]: row[1] for row in shot["live"]} == states[shot["entry"]]
        assert shot["allocated_bytes"] == totals[shot["entry"]] == sum(shot["by_category"].values())
    assert truth["peak"]["allocated_bytes"] == max(totals)
    for segment in snapshot["segments"]:
        assert segment["total_size"] == sum(b["size"] for b in segment["blocks"])


def at(truth: dict[str, Any], phase: str) -> dict[str, int]:
    return dict(truth["phases"][phase]["by_category"])


@pytest.fixture(scope="module")
def lora() -> tuple[Stream, dict[str, Any]]:
    return run_case(replace(CASES["c1_lora_ckpt"], completion=3), LAYERS)


@pytest.fixture(scope="module")
def nano() -> tuple[Stream, dict[str, Any]]:
    return run_case(CASES["c5b_nano_static_adamw"], LAYERS)


@pytest.mark.trl
def test_lora_closed_forms(lora: tuple[Stream, dict[str, Any]]) -> None:
    snapshot, truth = replay(lora[0], Variant(), lora[1])
    check(snapshot, truth)
    shapes = replace(CASES["c1_lora_ckpt"].model, layers=LAYERS)
    buffers = 2 * (shapes.head_dim // 2) * 4  # rotary frequencies, twice, fp32
    q, kv, r = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim, 16
    pairs = [(shapes.hidden, q), (shapes.hidden, kv), (shapes.hidden, kv), (q, shapes.hidden),
             (shapes.hidden, shapes.ffn), (shapes.hidden, shapes.ffn), (shapes.ffn, shapes.hidden)]
    adapters = 4 * LAYERS * sum(r * (a + b) for a, b in pairs)
    step = at(truth, "optimizer_step")
    assert step["weights"] == 2 * shapes.parameters() + buffers
    assert step["adapters"] == adapters == step["gradients"]
    assert step["optimizer_state"] == 2 * adapters + 4 * 2 * LAYERS * len(pairs)
    assert "reference_model" not in step
    peak = truth["phases"]["backward"]["by_detail"]
    tokens = 8 * (24 + 3) * 32
    boundaries = [row for row in truth["phases"]["backward"]["live"] if row[3] == "boundary"]
    assert {row[1] for row in boundaries} == {2 * tokens * shapes.hidden}
    assert peak["activations/boundary"] == len(boundaries) * 2 * tokens * shapes.hidden


@pytest.mark.trl
def test_kv_cache_closed_form(lora: tuple[Stream, dict[str, Any]]) -> None:
    _, truth = replay(lora[0], Variant(), lora[1])
    shapes = CASES["c1_lora_ckpt"].model
    sizes = {size for size, label in zip(lora[0].sizes, lora[0].labels, strict=True) if label[0] == "kv_cache"}
    # Prompt, then one token more with each decode; the last token is never cached.
    expected = {2 * 8 * shapes.kv_heads * shapes.head_dim * (24 + t) * 32 for t in range(3)}
    assert sizes == expected
    assert at(truth, "generate")["kv_cache"] >= 2 * LAYERS * min(expected)


@pytest.mark.trl
def test_backward_has_no_trainer_frames(lora: tuple[Stream, dict[str, Any]]) -> None:
    snapshot, _ = replay(lora[0], Variant(), lora[1])
    starts = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    engine = [e for e in starts if not e["frames"] or e["frames"][-1]["name"] in ("apply", "unpack_hook")]
    assert len(engine) > 100
    for entry in engine:
        assert not any("grpo_trainer" in str(f["filename"]) for f in entry["frames"])
    loaded = [e for e in starts if e["frames"] and e["frames"][0]["name"] == "_materialize_copy"]
    assert loaded
    assert not any(f["name"] == "from_pretrained" for e in loaded for f in e["frames"])
    private = str(Path(__file__).resolve().parents[3])
    assert not {str(f["filename"]) for e in starts for f in e["frames"] if private in str(f["filename"])}


def test_nano_closed_forms(nano: tuple[Stream, dict[str, Any]]) -> None:
    snapshot, truth = replay(nano[0], Variant(), nano[1])
    check(snapshot, truth)
    case = CASES["c5b_nano_static_adamw"]
    shapes = replace(case.model, layers=LAYERS)
    parameters = 4 * nano_parameters(shapes, (case.prompt + case.completion) * case.tokens)
    step = at(truth, "optimizer_step")
    assert step["weights"] == step["reference_model"] == step["gradients"] == parameters
    assert 2 * parameters <= step["optimizer_state"] < 2 * parameters + 1000
    cache = 2 * 2 * 8 * shapes.heads * shapes.head_dim * (case.prompt + case.completion) * case.tokens
    assert at(truth, "generate")["kv_cache"] == LAYERS * cache


@pytest.mark.parametrize("variant", [
    Variant("after_load", after_load=True), Variant("ring", keep_last=1500), Variant("cxx", cxx=True),
    Variant("device", device=1, n_devices=2), Variant("expandable", expandable=True),
], ids=lambda v: v.name)
def test_variants_hold_their_truth(nano: tuple[Stream, dict[str, Any]], variant: Variant) -> None:
    snapshot, truth = replay(nano[0], variant, nano[1])
    check(snapshot, truth)
    trace = snapshot["device_traces"][variant.device]
    if variant.keep_last:
        assert len(trace) == variant.keep_last
    if variant.after_load:
        assert all(e["frames"][-2]["name"] != "setup" for e in trace if len(e["frames"]) > 1)
    if variant.expandable:
        assert "segment_map" in {e["action"] for e in trace}
        assert snapshot["segments"][0]["is_expandable"]
    if variant.cxx:
        assert any("at::_ops::" in str(f["name"]) for f in trace[0]["frames"])
    if variant.n_devices == 2:
        assert 0 < len(snapshot["device_traces"][0]) < len(trace)


@pytest.mark.parametrize("unwind", ["held", "step", "all"])
def test_an_oom_ends_the_history(nano: tuple[Stream, dict[str, Any]], unwind: str) -> None:
    room = int(live_peak(nano[0]) * 0.9)
    snapshot, truth = replay(nano[0], Variant("oom", capacity=room, unwind=unwind), nano[1])
    check(snapshot, truth)
    entry = snapshot["device_traces"][0][truth["oom"]["entry"]]
    assert entry["action"] == "oom"
    assert "addr" not in entry
    assert 0 <= entry["device_free"] <= room
    left = truth["allocated_end"] / truth["peak"]["allocated_bytes"]
    assert {"held": left > 0.5, "step": 0.2 < left < 0.9, "all": left < 0.1}[unwind]


def test_a_long_run_repeats_its_step(nano: tuple[Stream, dict[str, Any]]) -> None:
    once = replay(nano[0], Variant(), nano[1])[1]
    snapshot, truth = replay(to_length(nano[0], 20_000), Variant("long"), nano[1])
    assert 19_000 < truth["entries"] < 30_000
    assert truth["peak"]["by_category"] == once["peak"]["by_category"]
    assert truth["allocated_end"] == once["allocated_end"]
    check(snapshot, truth)


def test_colliding_extents_are_refused() -> None:
    shapes = replace(CASES["c1_lora_ckpt"].model, tiny_ffn=8 * 24)
    with pytest.raises(ValueError, match="collide"):
        scale_for([shapes], 16, 24, 3, {8})


def test_heap_rules() -> None:
    events: list[tuple[str, int, int]] = []
    heap = Heap(lambda *e: events.append(e), capacity=64 * MIB)
    small = heap.malloc(1)
    assert (heap.blocks[small].size, heap.reserved) == (512, 2 * MIB)
    assert heap.blocks[heap.malloc(3 * MIB)].size == 3 * MIB
    assert heap.reserved == 22 * MIB
    large = heap.malloc(11 * MIB)  # best fit: the rest of the 20 MiB segment
    assert heap.reserved == 22 * MIB
    assert heap.blocks[large].requested == 11 * MIB
    with pytest.raises(HeapFull):
        heap.malloc(60 * MIB)
    heap.free(large)
    assert heap.malloc(17 * MIB) == large  # merged with the free rest behind it
    assert [e[0] for e in events] == ["segment_alloc", "segment_alloc"]


def test_the_command_leaves_no_frame_of_its_own(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from benchmarks.truth.__main__ import main

    asked = ["generate", "--out", str(tmp_path), "--case", "c5b_nano_static_adamw", "--layers", "1"]
    told = CliRunner().invoke(main, asked)
    assert told.exit_code == 0, told.exception
    with (tmp_path / "c5b_nano_static_adamw.normal.pickle").open("rb") as file:
        entries = pickle.load(file)["device_traces"][0]
    files = {str(frame["filename"]) for entry in entries for frame in entry["frames"]}
    assert any(file.startswith("/workspace/nano_grpo.py") for file in files)
    assert not [file for file in files if "click" in file]
