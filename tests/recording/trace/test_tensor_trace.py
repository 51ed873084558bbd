"""The tensor trace against what torch itself says about storages."""

from __future__ import annotations

import _thread
import gc
import io
import itertools
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode
from torch.utils.checkpoint import checkpoint

from memprof.analysis.analysis import analyze
from memprof.compat.optional_packages import RAW_THREAD_START, THREAD_START
from memprof.compat.torch import STORAGE_RESIZE
from memprof.recording import phase, record
from memprof.recording.trace import tensor_trace
from memprof.recording.trace.tensor_trace import TensorTrace
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.timeline.timeline import build_timeline


def trace(work: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """The raw snapshot of what ``work`` allocates; its result lives until the trace has ended."""
    recorder = TensorTrace(torch.device("cpu"), **options)
    gc.collect()  # what earlier tests left must not die in here
    recorder.start()
    try:
        kept = work()
    finally:
        recorder.stop()
    raw, recorded = recorder.dump()
    raw["recorded"] = recorded
    assert recorder.guard.failure is None
    del kept
    return raw


def events(raw: dict[str, Any], action: str = "alloc") -> list[dict[str, Any]]:
    return [e for e in raw["device_traces"][0] if e["action"] == action]


def tags(event: dict[str, Any]) -> dict[str, str]:
    assert event["user_metadata"].startswith("memprof:")
    return dict(pair.split("=", 1) for pair in event["user_metadata"][8:].split(";"))


def ops(raw: dict[str, Any]) -> list[str]:
    return [tags(e)["op"] for e in events(raw)]


def test_births_deaths_and_what_is_left() -> None:
    def work() -> torch.Tensor:
        a = torch.empty(1000)
        del a
        return torch.zeros(10, 10)

    raw = trace(work)
    (gone, kept) = events(raw)
    assert (gone["size"], kept["size"]) == (4000, 400)
    assert [e["addr"] for e in events(raw, "free_completed")] == [gone["addr"]]
    held = {s["address"]: s for s in raw["segments"]}
    assert gone["addr"] not in held or held[gone["addr"]]["total_size"] != 4000
    assert held[kept["addr"]]["blocks"][0]["requested_size"] == 400
    assert tags(kept) == {
        "phase": "other", "region": "outside", "shape": "10x10", "dtype": "float32", "op": "aten.zeros.default"
    }  # fmt: skip


def test_times_are_strictly_increasing_and_every_free_is_two_events() -> None:
    raw = trace(lambda: [torch.ones(100) + i for i in range(200)][:1])
    times = [e["time_us"] for e in raw["device_traces"][0]]
    assert all(b > a for a, b in itertools.pairwise(times))
    assert len(events(raw, "free_requested")) == len(events(raw, "free_completed")) >= 399


def test_views_and_aliases_count_once() -> None:
    def work() -> list[torch.Tensor]:
        a = torch.ones(64)
        return [a, a.view(8, 8), a[3:], a.t(), a.detach(), a.add_(1), a.unsqueeze(0).expand(5, 64)]

    assert len(events(trace(work))) == 1


def test_what_lived_before_is_held_and_its_death_is_seen() -> None:
    old = torch.ones(12345)
    before = torch.ones(54321)
    address = old.untyped_storage().data_ptr()

    def work() -> None:
        nonlocal old
        old = old.view(3, -1)[:1].clone()

    raw = trace(work)
    assert raw["recorded"].history == "started_late"
    assert address not in {e["addr"] for e in events(raw)}
    assert address in {e["addr"] for e in events(raw, "free_completed")}
    assert before.untyped_storage().data_ptr() in {s["address"] for s in raw["segments"]}


def test_what_a_frozen_collector_does_not_list_is_held_too(tmp_path: Path) -> None:
    """In a process of its own: what is frozen here stays so."""
    (tmp_path / "frozen.py").write_text(
        "import gc, sys, torch\nfrom memprof import record\n"
        "def main():\n"
        "    model = torch.nn.Linear(256, 256)\n"
        "    if sys.argv[2] == 'freeze':\n        gc.freeze()\n"
        "    with record(sys.argv[1], model=model):\n        model(torch.ones(8, 256)).sum().backward()\n"
        "kept = [torch.zeros(1000, 1000)]\nmain()\n"
    )
    peaks = []
    for way in ("freeze", "not"):
        target = tmp_path / f"{way}.pickle"
        subprocess.run([sys.executable, "frozen.py", target, way], cwd=tmp_path, check=True)
        found = analyze(target)
        peaks.append((found.peak.active_bytes, found.own_peaks))
        assert any("gc.freeze()" in note for note in load_snapshot(target).run.notes) == (way == "freeze")
    assert peaks[0] == peaks[1]


def test_tensors_made_without_any_operation_are_seen_when_used() -> None:
    raw = trace(lambda: [torch.from_numpy(np.ones(333)), torch.tensor([1.0] * 77)])
    assert sorted(e["size"] for e in events(raw)) == [77 * 4, 333 * 8]


UNSEEN = {
    "frombuffer": lambda: torch.frombuffer(bytearray(2**20), dtype=torch.uint8),
    "UntypedStorage": lambda: torch.UntypedStorage(2**20),
    "shared storage": lambda: torch.UntypedStorage._new_shared(2**20),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_operation_has_made_is_counted_at_the_end_and_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a recording used to be complete, without it."""
    monkeypatch.setattr(tensor_trace, "_tracked_objects", lambda: made)
    made: list[Any] = []
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    for count in (1, 2):  # a second write while recording goes on
        made.append(UNSEEN[name]())
        raw, recorded = recorder.dump()
        assert sum(segment["total_size"] for segment in raw["segments"]) == count * 2**20
        assert recorded.history == "started_late"
        (note,) = recorder.notes
        assert note.startswith(f"{count}.00 MiB were allocated by what memprof does not record")
    made.clear()
    recorder.stop()
    assert len(events(recorder.dump()[0], "free_completed")) == 2


def test_a_mapped_file_whose_parts_are_tensors_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As safetensors reads a model: the file is a storage, and so is each part."""
    (tmp_path / "model").write_bytes(bytes(2**20))
    file = torch.UntypedStorage.from_file(str(tmp_path / "model"), False, 2**20)
    parts = [torch.asarray(file[start : start + 2**19], dtype=torch.uint8) for start in (0, 2**19)]
    monkeypatch.setattr(tensor_trace, "_tracked_objects", lambda: [file, *parts])
    assert sum(segment["total_size"] for segment in trace(lambda: None)["segments"]) == 2**20


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.zeros(2**18).share_memory_(),
        lambda: torch.zeros(2**16).untyped_storage().resize_(2**20),
        lambda: torch.from_numpy(np.zeros(2**17)),
    ],
)
def test_what_operations_or_a_resize_have_made_is_complete(
    work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_trace, "_tracked_objects", lambda: [])
    raw = trace(work)
    assert raw["recorded"].history == "complete"
    assert sum(segment["total_size"] for segment in raw["segments"]) == 2**20


def test_a_resized_storage_is_freed_and_born_again() -> None:
    def work() -> torch.Tensor:
        a = torch.empty(100)
        a.resize_(5000)
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(20000)
        return a

    raw = trace(work)
    assert [e["size"] for e in events(raw)] == [400, 20000, 20000]
    assert len(events(raw, "free_completed")) == 2
    assert "resize_" not in vars(torch.UntypedStorage)


def test_out_arguments_that_grow_are_followed() -> None:
    def work() -> torch.Tensor:
        out = torch.empty(0)
        torch.add(torch.ones(50), 1, out=out)
        return out

    assert 200 in [e["size"] for e in events(trace(work)) if "out" in tags(e)["op"]]


def test_regions_of_a_training_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def work() -> None:
        with torch.no_grad():
            model(torch.ones(2, 8))
        hidden = checkpoint(model[:2], torch.ones(2, 8, requires_grad=True), use_reentrant=False)
        model[2](hidden).sum().backward()
        optimizer.step()

    seen = [(tags(e)["region"], tags(e)["op"]) for e in events(trace(work))]
    by_region = {region: {op for r, op in seen if r == region} for region, _ in seen}
    assert set(by_region) == {"outside", "no_grad", "forward", "backward", "recompute", "optimizer"}
    assert "aten.addmm.default" in by_region["recompute"] & by_region["forward"] & by_region["no_grad"]
    assert "aten.gelu_backward.default" in by_region["backward"]
    assert "aten.zeros_like.default" in by_region["optimizer"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_module_stack_is_balanced_after_exceptions_and_early_stopped_recomputation(reentrant: bool) -> None:
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("the user's own")

    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), Breaks())
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    try:
        with pytest.raises(ValueError, match="own"):
            inner(torch.ones(1, 4))
        x = torch.ones(1, 4, requires_grad=True)
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert recorder.scope.innermost is None
    finally:
        recorder.stop()
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks


def test_module_names_and_roles() -> None:
    policy, reference = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 4)
    recorder = TensorTrace(torch.device("cpu"))
    recorder.scope.add_root(policy, "policy")
    recorder.scope.add_root(reference, "reference")
    recorder.start()
    kept = [policy(torch.ones(2, 4)), reference(torch.ones(3, 4))]
    recorder.stop()
    found = {(tags(e)["module"], tags(e)["role"]) for e in events(recorder.dump()[0]) if "module" in tags(e)}
    assert found == {("0", "policy"), ("Linear", "reference")}
    del kept


def test_stacks_name_the_users_code_and_never_ours() -> None:
    raw = trace(lambda: torch.ones(7))
    (event,) = events(raw)
    files = [f["filename"] for f in event["frames"]]
    assert files[0] == __file__
    assert not any("/memprof/recording/" in f for f in files)
    assert events(trace(lambda: torch.ones(7), stacks=None))[0]["frames"] == []


def test_equal_stacks_and_tags_are_stored_once() -> None:
    raw = trace(lambda: [torch.ones(9) for _ in range(50)])
    assert len({id(e["frames"]) for e in events(raw)}) == 1
    assert len({id(e["user_metadata"]) for e in events(raw)}) == 1


def test_a_bounded_trace_drops_the_oldest_and_says_so(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    with record(tmp_path / "ring.pickle", max_entries=60) as session:
        kept.append(torch.ones(1111))
        for i in range(300):
            torch.ones(10 + i)
        kept.append(torch.ones(2222))
    recorded = session.recorder.dump()[1]
    assert recorded.history == "truncated"
    assert recorded.dropped_events > 500
    line = build_timeline(load_snapshot(tmp_path / "ring.pickle"))
    assert line.n_events <= 60
    # What fell off the ring but lives is there from the beginning.
    assert {4444, 8888} <= set(line.size[line.alive_at(line.n_events)].tolist())
    assert int(line.allocated[-1]) == sum(s["total_size"] for s in session.recorder.dump()[0]["segments"])


def test_the_peak_is_the_sum_of_what_lived(tmp_path: Path) -> None:
    gc.collect()
    with record(tmp_path / "peak.pickle") as session:
        base = session.recorder._allocated
        a = torch.ones(1_000_000)
        b = a * 2
        del a
        c = torch.ones(500_000)
        del b
    line = build_timeline(load_snapshot(tmp_path / "peak.pickle"))
    assert line.max_requested == base + 8_000_000
    assert int(line.allocated[-1]) == base + 2_000_000
    assert c.numel() == 500_000


def test_threads_that_start_during_the_recording_are_counted() -> None:
    """Threads, a subclass of them, a pool's, and one that a thread starts: what comes and goes on each."""

    class Own(threading.Thread):
        def run(self) -> None:
            torch.ones(2000)

    def nested() -> None:
        inner = threading.Thread(target=torch.ones, args=(3000,))
        inner.start()
        inner.join()
        torch.ones(4000)

    def work() -> list[torch.Tensor]:
        threads = [threading.Thread(target=torch.ones, args=(1000,)), Own(), threading.Thread(target=nested)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("run" not in vars(thread) for thread in threads)
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(torch.ones, [5000] * 10))

    start = threading.Thread.start
    raw = trace(work)
    assert threading.Thread.start is start
    assert sorted(e["size"] // 4 for e in events(raw)) == [1000, 2000, 3000, 4000, *[5000] * 10]
    assert len(events(raw, "free_completed")) == 4
    assert {tags(e)["op"] for e in events(raw)} == {"aten.ones.default"}


def test_work_on_threads_adds_up_to_what_the_same_work_takes_alone() -> None:
    def work() -> float:
        rows = torch.ones(50, 1000)
        return float(sum((rows + i).exp().sum() for i in range(20)))

    def many() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(lambda _: work(), range(12)))) == 1

    alone = [e["size"] for e in events(trace(work))]
    together = events(trace(many))
    assert sorted(e["size"] for e in together) == sorted(alone * 12)
    line = build_timeline(snapshot_from_raw({k: v for k, v in trace(many).items() if k != "recorded"}))
    assert [note for note in line.notes if "contradict" in note] == []
    assert int(line.allocated[-1]) == int(line.allocated[0])


def test_threads_are_counted_however_they_are_started() -> None:
    """Below ``threading``, by a method that was saved before or overridden, with a ``run`` of the user's own."""
    saved = threading.Thread.start

    class Overridden(threading.Thread):
        def start(self) -> None:
            saved(self)

    own = threading.Thread()

    def run() -> None:
        torch.ones(4000)

    own.run = run  # type: ignore[method-assign]

    def work() -> None:
        done = _thread.allocate_lock()
        done.acquire()

        def raw(count: int, *, release: Callable[[], None]) -> None:
            torch.ones(count)
            release()

        _thread.start_new_thread(raw, (1000,), {"release": done.release})
        done.acquire()
        threads = [threading.Thread(target=torch.ones, args=(2000,)), Overridden(target=torch.ones, args=(3000,)), own]
        for thread in threads:
            saved(thread) if type(thread) is threading.Thread else thread.start()
        for thread in threads:
            thread.join()
        assert [thread.name for thread in threading.enumerate() if "Dummy" in thread.name] == before

    before = [thread.name for thread in threading.enumerate() if "Dummy" in thread.name]
    starts = _thread.start_new_thread
    raw = trace(work)
    assert sorted(e["size"] // 4 for e in events(raw)) == [1000, 2000, 3000, 4000]
    assert own.run is run
    assert _thread.start_new_thread is starts


def _beside_a_thread(work: Callable[[], Any]) -> list[str]:
    """The notes of a recording during which a thread of before it does some work."""
    begin, done, end = threading.Event(), threading.Event(), threading.Event()
    made: list[Any] = []

    def loop() -> None:
        begin.wait(30)
        made.append(work())
        done.set()
        end.wait(30)

    early = threading.Thread(target=loop, name="early bird")
    early.start()
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    begin.set()
    done.wait(30)
    recorder.stop()
    end.set()
    early.join()
    assert len(made) == 1
    assert recorder.dump()[1].history != "complete" or not recorder.notes
    return [note for note in recorder.notes if "early bird" in note or "does not record" in note]


def test_a_thread_from_before_the_recording_is_told_of() -> None:
    """It can't be watched: what is alive at the end is counted then, and a note says that the thread worked."""

    def temporaries() -> None:
        for _ in range(2000):
            torch.ones(100_000)

    counted, alive = _beside_a_thread(lambda: torch.ones(2**20))
    assert counted.startswith("4.00 MiB were allocated by what memprof does not record")
    (gone,) = _beside_a_thread(temporaries)
    assert all("what came and went on them is not counted" in note for note in (alive, gone))


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="threads' CPU times are Linux's")
def test_an_idle_thread_from_before_the_recording_is_not_told_of() -> None:
    assert _beside_a_thread(lambda: None) == []


def test_a_thread_that_outlives_the_recording_is_recorded_no_more_and_keeps_nothing() -> None:
    """The mode used to stay on its stack, and kept the recording alive."""
    started, go, results = threading.Event(), threading.Event(), []
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()

    def loop() -> None:
        torch.ones(99)
        started.set()
        go.wait(30)
        results.append(torch.ones(777))
        results.append(_get_current_dispatch_mode_stack())
        results.append(sys.getprofile())
        results.append(torch.ones(888))

    late = threading.Thread(target=loop)
    late.start()
    assert started.wait(30)
    pool = ThreadPoolExecutor(1)
    pool.submit(torch.ones, 5).result()
    recorder.stop()
    count, left = recorder._count, weakref.ref(recorder)
    assert recorder.guard.failure is None
    del recorder
    gc.collect()
    assert left() is None, "while both threads still run"
    go.set()
    late.join()
    pool.submit(torch.ones, 5).result()
    assert pool.submit(_get_current_dispatch_mode_stack).result() == []
    pool.shutdown()
    assert results[1:3] == [[], None]
    assert count >= 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_recordings_that_overlap_end_in_any_order(order: tuple[int, int]) -> None:
    """One used to say that the other's mode outlives it, to record on after its end, and to leave its patches."""
    places = [target.place() for target in (STORAGE_RESIZE, THREAD_START, RAW_THREAD_START)]
    before = [getattr(owner, name) for owner, name in places]
    both = [TensorTrace(torch.device("cpu"), capacity=10**9) for _ in range(2)]
    kept = []
    for recorder in both:
        recorder.start()
        kept.append(torch.ones(1000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both[order[0]].stop()
    count = both[order[0]]._count
    kept[0].untyped_storage().resize_(8000)
    thread = threading.Thread(target=torch.ones, args=(2000,))
    thread.start()
    thread.join()
    both[order[1]].stop()
    assert both[order[0]]._count == count
    assert [getattr(owner, name) for owner, name in places] == before
    assert _get_current_dispatch_mode_stack() == []
    sizes = [e["size"] for e in events(both[order[1]].dump()[0])]
    assert {8000} <= set(sizes)
    assert [recorder.notes for recorder in both] == [[], []]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="threads' CPU times are Linux's")
def test_threads_of_loggers_are_not_told_of(tmp_path: Path) -> None:
    """They use the CPU and run none of torch's operations; what nobody has seen being made is told of all the same."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    prometheus_client, tqdm = pytest.importorskip("prometheus_client"), pytest.importorskip("tqdm")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    server, serving = prometheus_client.start_http_server(0, addr="127.0.0.1")
    bar = tqdm.tqdm(range(3), mininterval=0, file=io.StringIO())
    assert tqdm.tqdm.monitor is not None
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    spent = [one.cpu_ns for one in recorder._threads._earlier if one.is_logger]
    for step in range(3000):
        writer.add_scalar("loss", step, step)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    for _ in range(20):
        with urllib.request.urlopen(url) as answer:
            answer.read()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not any(
        one.may_have_worked for one in recorder._threads.earlier() if one.is_logger
    ):
        time.sleep(0.05)
    assert any(one.may_have_worked for one in recorder._threads.earlier() if one.is_logger)
    recorder.stop()
    server.shutdown()
    server.server_close()
    serving.join()
    bar.close()
    assert len(spent) >= 3
    assert [note for note in recorder.notes if "running before the recording began" in note] == []


def test_meta_fake_and_sparse_tensors_are_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def work() -> list[torch.Tensor]:
        with FakeTensorMode():
            fake = torch.ones(100, 100) @ torch.ones(100, 100) + torch.randn(100)
        indices = torch.tensor([[0, 1], [1, 0]])
        return [fake, torch.empty(100, device="meta") + 1, torch.sparse_coo_tensor(indices, torch.ones(2), (2, 2))]

    assert all(e["size"] <= 64 for e in events(trace(work)))


class Counts(TorchDispatchMode):
    """A user's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_lives_inside_a_users_mode_and_around_one() -> None:
    with Counts() as outer:
        raw = trace(lambda: torch.ones(5) + 1)
        assert outer.calls >= 2
        assert [type(m) for m in _get_current_dispatch_mode_stack()] == [Counts]
    assert len(events(raw)) >= 1

    def work() -> torch.Tensor:
        with Counts() as inner:
            result = torch.ones(5) + 1
        assert inner.calls == 2
        return result

    assert ops(trace(work)) == ["aten.ones.default", "aten.add.Tensor"]
    assert _get_current_dispatch_mode_stack() == []


def test_a_users_mode_that_outlives_the_trace_is_kept() -> None:
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    theirs = Counts()
    theirs.__enter__()
    with pytest.warns(RuntimeWarning, match="Counts was entered during"):
        recorder.stop()
    assert _get_current_dispatch_mode_stack() == [theirs]
    torch.ones(3)
    assert theirs.calls == 1
    theirs.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []


def test_an_exit_that_took_our_mode_is_survived() -> None:
    theirs = Counts()
    theirs.__enter__()
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    theirs.__exit__(None, None, None)  # pops ours
    with pytest.warns(RuntimeWarning, match="already been taken off"):
        recorder.stop()
    while _get_current_dispatch_mode_stack():
        _pop_mode()


def test_a_mistake_of_ours_stops_the_trace_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TensorTrace(torch.device("cpu"))
    monkeypatch.setattr(recorder._region, "now", lambda *_: 1 / 0)
    recorder.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [float(torch.ones(2).sum()) for _ in range(5)]
    recorder.stop()
    assert results == [2.0] * 5
    assert len([w for w in caught if "stopped watching" in str(w.message)]) == 1
    assert isinstance(recorder.guard.failure, ZeroDivisionError)


def test_a_failed_allocation_is_told_with_its_stack() -> None:
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(2**50, dtype=torch.uint8)
    finally:
        recorder.stop()
    found = recorder.oom()
    assert found is not None
    assert found.requested_bytes == 2**50
    assert found.stack[0].startswith(__file__)


def test_compiled_code_stays_compiled_and_higher_order_operators_work() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    graphs = 0

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=backend, fullgraph=True)

    def work() -> list[torch.Tensor]:
        query = torch.randn(1, 2, 16, 8)
        return [compiled(torch.ones(50)), flex_attention(query, query, query)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex_attention says that it is slow uncompiled
        raw = trace(work)
    assert graphs == 1
    assert 200 in [e["size"] for e in events(raw)]


def test_the_compiler_never_looks_at_the_traces_own_code() -> None:
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call_"))
        return module.forward

    @torch.compile(backend=backend)
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return eager(y).cos()

    @torch.compiler.disable(recursive=False)
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    from torch._dynamo.utils import counters

    counters.clear()
    broken(torch.ones(50))
    frames = dict(counters["frames"])
    torch._dynamo.reset()
    counters.clear()
    seen.clear()
    raw = trace(lambda: broken(torch.ones(50)))
    assert dict(counters["frames"]) == frames
    assert ops(raw)[0] == "aten.ones.default"
    assert {"aten.mul.Tensor", "aten.add.Tensor"} <= set(ops(raw))
    assert seen == ["sin", "cos"]


def test_a_numbered_cpu_is_the_cpu() -> None:
    recorder = TensorTrace(torch.device("cpu", 1))
    recorder.start()
    kept = torch.ones(31)
    recorder.stop()
    assert [e["size"] for e in events(recorder.dump()[0])] == [124]
    assert kept.numel() == 31


def test_windows_nest() -> None:
    gc.collect()
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    recorder.open_window()
    base = recorder._allocated
    recorder.open_window()
    a = torch.ones(1000)
    del a
    inner = recorder.close_window()
    outer = recorder.close_window()
    recorder.stop()
    assert inner.allocated_peak == outer.allocated_peak == base + 4000
    assert outer.allocated_end == base


def test_random_numbers_and_results_are_the_same_to_the_bit() -> None:
    def train() -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            with phase("forward"):
                loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()])

    plain_losses, plain_parameters = train()
    recorder = TensorTrace(torch.device("cpu"))
    recorder.start()
    losses, parameters = train()
    recorder.stop()
    assert losses == plain_losses
    assert len(set(losses)) == 5
    assert torch.equal(parameters, plain_parameters)
