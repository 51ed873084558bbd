"""What the recorder of fake tensors sees, and what it makes of the autograd engine's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@contextmanager
def _recording(cuda: bool = True) -> Iterator[Any]:
    from memprof.allocator.model import CachingAllocator
    from memprof.recording.recorder import DeviceInfo
    from memprof.simulate.fake_cuda.dispatch import OperationTracking
    from memprof.simulate.fake_cuda.fakes import fake_world
    from memprof.simulate.recorder.plain_heap import PlainHeap
    from memprof.simulate.recorder.recorder import FakeRecorder

    heap = CachingAllocator() if cuda else PlainHeap()
    recorder = FakeRecorder(heap, DeviceInfo(0, "cuda", "test", None), cuda=cuda, stacks=None)
    with fake_world(cuda=cuda), OperationTracking(recorder, True, lambda shape: 3):
        recorder.start()
        try:
            yield recorder
        finally:
            recorder.stop()


def _peak_over(recorder: Any, work: Callable[[], Any]) -> int:
    heap = recorder.allocator
    heap.max_requested = before = heap.requested
    work()
    return int(heap.max_requested - before)


def test_storages_are_counted_once_and_until_their_last_view_goes() -> None:
    with _recording() as recorder:
        x = torch.empty(1000)
        view = x[:10]
        assert recorder.allocator.requested == 4000
        del x
        assert recorder.allocator.requested == 4000
        del view
        assert recorder.allocator.requested == 0


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float16", 4), ("bfloat16", 8)])
@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
def test_cuda_reads_fp16_where_a_softmax_answers_in_float32(operation: str, dtype: str, bytes_each: int) -> None:
    """As an emulated T4 did: of bfloat16 there is a copy in float32 first."""
    with _recording() as recorder:
        scores = torch.empty(64, 64, dtype=getattr(torch, dtype))
        peak = _peak_over(recorder, lambda: getattr(torch, operation)(scores, dim=-1, dtype=torch.float32))
        assert peak == bytes_each * scores.numel()
        wanted = scores.clone().requires_grad_()
        made = getattr(torch, operation)(wanted, dim=-1, dtype=torch.float32)
        (given,) = torch.autograd.grad(made.sum(), wanted)
        assert (made.dtype, given.dtype) == (torch.float32, scores.dtype)


def test_the_engine_adds_in_place_what_it_alone_holds() -> None:
    with _recording() as recorder:
        w = torch.empty(64, 64)
        x = torch.empty(64, 64, requires_grad=True)
        h = x * 2
        loss = (h * w).sum() + (h * w).sum()
        trace = recorder.blocks.trace.events
        events = len(trace)
        loss.backward()
        made = [e for e in trace[events:] if e.action == "alloc" and "op=aten.add.Tensor" in e.tag]
        assert made == []


def test_the_engine_does_not_write_into_what_others_hold() -> None:
    with _recording() as recorder:
        w = torch.empty(64, 64)
        x = torch.empty(64, 64, requires_grad=True)
        a, b = x * 2, x * 3
        d, e = a * 1.5, b * 1.7
        c = a + b  # its gradient goes to a and to b, as one tensor
        loss = (c * w).sum() + (d * w).sum() + (e * w).sum()
        trace = recorder.blocks.trace.events
        events = len(trace)
        loss.backward()
        made = [v for v in trace[events:] if v.action == "alloc" and "op=aten.add.Tensor" in v.tag]
        assert len(made) == 1


def test_a_scalar_has_the_value_it_was_made_with_or_a_harmless_one() -> None:
    with _recording():
        assert torch.tensor(7).item() == 7
        assert torch.empty(3).isnan().any().item() is False
        assert torch.empty(3).sum().item() == 1.0


def test_a_boolean_index_takes_what_the_policy_says() -> None:
    with _recording():
        x, mask = torch.empty(8, 5), torch.empty(8, dtype=torch.bool)
        assert x[mask].shape == (3, 5)
        assert mask.nonzero().shape == (3, 1)
        assert torch.masked_select(x, x > 0).shape == (3,)


def test_plain_memory_counts_bytes_as_they_are() -> None:
    with _recording(cuda=False) as recorder:
        x = torch.empty(3)
        assert recorder.allocator.allocated == 12
        del x
        assert recorder.allocator.allocated == 0


def test_the_world_is_left_as_it_was() -> None:
    import gc

    from torch.nn import functional

    attention, apply, enabled = functional.scaled_dot_product_attention, torch.nn.Module._apply, gc.isenabled()
    with _recording():
        assert functional.scaled_dot_product_attention is not attention
    assert functional.scaled_dot_product_attention is attention
    assert torch.nn.Module._apply is apply
    assert gc.isenabled() == enabled
    assert "resize_" not in torch.UntypedStorage.__dict__
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.exp(torch.zeros(2, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_autocast_follows_cudas_lists() -> None:
    with _recording(), torch.autocast("cpu", dtype=torch.bfloat16):
        half, full = torch.empty(4, 4, dtype=torch.bfloat16), torch.empty(4, 4)
        for made in (half.exp(), half.pow(2), half.rsqrt(), half.sum(), half.softmax(-1), half.cumsum(0)):
            assert made.dtype is torch.float32
        for made in (half.mean(), half.sigmoid(), full @ full, torch.nn.functional.linear(full, full)):
            assert made.dtype is torch.bfloat16


def test_the_cpu_keeps_its_own_lists() -> None:
    with _recording(cuda=False), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.empty(4, dtype=torch.bfloat16).exp().dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "masked", "grouped", "gqa", "wanted", "kernel"),
    [
        ("bfloat16", False, False, False, None, "flash"),
        ("bfloat16", False, True, True, None, "flash"),
        ("bfloat16", True, False, False, None, "efficient"),
        ("bfloat16", True, True, True, None, "math"),
        ("float32", False, False, False, None, "efficient"),
        ("float32", False, True, True, None, "math"),
        ("bfloat16", False, False, False, "math", "math"),
        ("bfloat16", False, False, False, "efficient", "efficient"),
    ],
)
def test_attention_is_the_kernel_cuda_would_choose(
    kind: str, masked: bool, grouped: bool, gqa: bool, wanted: str | None, kernel: str
) -> None:
    from memprof.simulate.fake_cuda.sdpa_kernels import sdpa_choice

    query = torch.empty(1, 4, 8, 16, dtype=getattr(torch, kind), device="meta")
    key = torch.empty(1, 2 if grouped else 4, 8, 16, dtype=getattr(torch, kind), device="meta")
    mask = torch.empty(1, 1, 8, 8, dtype=torch.bool, device="meta") if masked else None
    assert sdpa_choice(query, key, mask, gqa, wanted) == kernel


def test_flash_attention_saves_no_scores() -> None:
    from torch.nn import functional

    with _recording() as recorder:
        tokens = 512
        # enough heads to keep a card busy: keys are not divided among idle processors
        q, k, v = (torch.empty(16, 2, tokens, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        flash = _peak_over(recorder, lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
        masked = _peak_over(recorder, lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert flash < 16 * 2 * tokens * tokens
    assert masked > 2 * tokens * tokens


def test_a_fake_steps_regions_are_those_of_a_real_one() -> None:
    with _recording() as recorder:
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            model(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        tagged = [event.tag for event in recorder.blocks.trace.events if event.tag]
        tags = [dict(pair.split("=", 1) for pair in tag.split(";") if "=" in pair) for tag in tagged]
    assert {tag["region"] for tag in tags} == {"outside", "no_grad", "forward", "backward", "optimizer"}
    assert {tag["region"] for tag in tags if tag["op"] == "aten.zeros_like.default"} == {"optimizer"}


@pytest.mark.parametrize(
    "conf",
    [
        "", "roundup_power2_divisions:2", "roundup_power2_divisions:[1024:2,>:4]", "max_split_size_mb:64",
        "max_split_size_mb:64,max_non_split_rounding_mb:512", "large_segment_size_mb:64",
        "expandable_segments:True,large_segment_size_mb:64",
    ],
)  # fmt: skip
def test_a_simulated_snapshot_holds_the_settings_that_its_blocks_were_made_by(conf: str) -> None:
    """Of blocks freed in it, the sizes follow from the settings: the timeline has the allocator's own totals."""
    from memprof.allocator.settings import parse_settings, settings_of
    from memprof.simulate.run import simulate
    from memprof.snapshot import snapshot_from_raw
    from memprof.timeline.timeline import build_timeline

    def work(session: Any) -> None:
        large = [torch.empty(1100 * 2**20 // 4) for _ in range(3)]
        del large
        some = [torch.empty(size * 2**18) for size in (100, 300, 2, 5, 8)]
        del some

    raw = simulate(work, alloc_conf=conf, config={"alloc_conf": conf})
    timeline = build_timeline(snapshot_from_raw(raw))
    assert timeline.reserved is not None
    highest = raw["memprof"]["highest"]
    assert (timeline.allocated.max(), timeline.reserved.max()) == (
        highest["allocated_bytes"],
        highest["reserved_bytes"],
    )
    assert settings_of(raw["allocator_settings"]) == parse_settings(conf)


def test_a_simulation_says_that_collecting_garbage_alone_has_no_effect() -> None:
    from memprof.simulate.run import simulate

    def work(session: Any) -> None:
        for size in (100, 200, 300):
            torch.empty(size * 2**18)

    plain, collecting = (
        simulate(work, alloc_conf=conf, capacity=700 * 2**20) for conf in ("", "garbage_collection_threshold:0.3")
    )
    assert collecting["memprof"]["highest"] == plain["memprof"]["highest"]
    assert any("garbage_collection_threshold:0.3 has no effect" in note for note in collecting["memprof"]["notes"])


def test_a_run_that_its_own_memory_fraction_stops_does_not_fit() -> None:
    from memprof.config.gpus import find_gpu
    from memprof.simulate.evaluate import judge
    from memprof.simulate.run import simulate

    gpu = find_gpu("24GB")

    def run(fraction: float, capacity: int | None) -> Any:
        conf = f"per_process_memory_fraction:{fraction}"
        return simulate(lambda _: torch.empty(2**30), alloc_conf=conf, capacity=capacity, gpu=gpu)

    verdicts = [judge(lambda room, part=part: run(part, room), gpu).verdict for part in (0.1, 0.5)]
    assert [verdict is not None and verdict.fits for verdict in verdicts] == [False, True]
