"""Replay a labelled stream through the heap and write the snapshot with the truth beside it."""

from __future__ import annotations

import gzip
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.truth.labels import Label, label_all
from benchmarks.truth.replay.heap import Heap, HeapFull
from benchmarks.truth.scale import Scale
from benchmarks.truth.trace.stacks import Frame, public_frames
from benchmarks.truth.trace.tracer import Tracer

EPOCH_US = 1_763_000_000_000_000
WORKSPACE = 32 * 2**20  # cuBLAS, per handle and stream, on compute capability 9
PHASES = ("load", "generate", "reward", "old_logprobs", "reference_logprobs", "forward", "backward",
          "optimizer_step", "other")
_STAYING = ("weights", "adapters", "reference_model", "reward_model", "optimizer_state")


@dataclass
class Stream:
    """A labelled run: ``steps`` are (kind, key, frames, phase); kinds "a", "f" and "m" (a named mark)."""

    steps: list[tuple[str, int, int, str]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    frames: list[list[Frame]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    frame_ops: list[tuple[str, str]] = field(default_factory=list)

    def add(self, size: int, label: Label) -> int:
        self.sizes.append(size)
        self.labels.append(label)
        return len(self.sizes) - 1


@dataclass(frozen=True)
class Variant:
    """How the run was recorded."""

    name: str = "normal"
    after_load: bool = False
    keep_last: int | None = None
    capacity: int | None = None
    unwind: str = "held"  # after an OOM: "held" (snapshot at once), "step" or "all" (what unwinding frees)
    device: int = 0
    n_devices: int = 1
    expandable: bool = False
    cxx: bool = False


def build_stream(tracer: Tracer, scale: Scale) -> Stream:
    """Scale, label and complete (loader warm-up, cuBLAS workspaces) what the tracer saw."""
    labels = label_all(tracer, scale)
    sizes = [scale.count(s.shape) * s.dtype.itemsize for s in tracer.storages]
    out = Stream(sizes=sizes, labels=labels, marks=list(tracer.marks))
    index: dict[tuple[int, str, str], int] = {}
    shared: dict[tuple[int, str], list[Frame]] = {}

    def frames(stack: int, op: str = "", node: str = "") -> int:
        if (stack, op, node) not in index:
            index[stack, op, node] = len(out.frames)
            made = op if op in ("Module.to", "materialize", "warmup") else ""
            if (stack, made) not in shared:
                shared[stack, made] = public_frames(tracer.stacks[stack], made)
            out.frames.append(shared[stack, made])
            out.frame_ops.append((op, node))
        return index[stack, op, node]

    warmups = dict(tracer.warmups)
    works = {at: (stack, phase) for at, stack, phase in tracer.first_matmul.values()}
    for i, (kind, n, stack, phase) in enumerate(tracer.events):
        if i in warmups:
            key = out.add(_loaded_bytes(tracer, sizes, i), ("temporaries", "load"))
            out.steps += [("a", key, frames(warmups[i], "warmup"), phase),
                          ("f", key, frames(warmups[i]), phase)]
        if i in works:
            key = out.add(WORKSPACE, ("temporaries", "workspace"))
            out.steps.append(("a", key, frames(works[i][0], "aten.mm"), works[i][1]))
        s = tracer.storages[n] if kind == "a" else None
        where = 0 if kind == "m" else frames(stack, s.op, s.node) if s else frames(stack)
        out.steps.append((kind, n, where, phase))
    return out


def _loaded_bytes(tracer: Tracer, sizes: Sequence[int], start: int) -> int:
    """Return the bytes the loader is about to materialise: what its warm-up asks for."""
    total = 0
    for kind, n, _, _ in tracer.events[start:]:
        if kind == "m" and tracer.marks[n] == "loaded":
            break
        if kind == "a" and tracer.storages[n].op == "materialize":
            total += sizes[n]
    return total


class _Recorder:
    """Writes trace entries as torch does, one clock for all."""

    def __init__(self, stream: Stream, variant: Variant) -> None:
        self.stream, self.variant = stream, variant
        self.entries: list[dict[str, Any]] = []
        self.keys: list[int] = []
        self.phases: list[str] = []
        self.annotations: list[dict[str, Any]] = []
        self.clock, self.noise = EPOCH_US, 7
        self.at = (0, "load")
        self.heap = Heap(lambda a, ad, n: self.write(a, ad, n, -1), base=0x7F2A00000000 + (variant.device << 40),
                         capacity=variant.capacity or 2**62, expandable=variant.expandable)
        self.address: dict[int, int] = {}
        self.born_frames: dict[int, int] = {}
        self.segment_frames: dict[int, int] = {}
        self.train_entry: int | None = None
        self.oom: dict[str, Any] | None = None
        self._mixed: dict[int, list[Frame]] = {}

    def frames(self, index: int) -> list[Frame]:
        if not self.variant.cxx:
            return self.stream.frames[index]
        if index not in self._mixed:
            from benchmarks.truth.replay.cxx import mixed

            self._mixed[index] = mixed(self.stream.frames[index], *self.stream.frame_ops[index])
        return self._mixed[index]

    def write(self, action: str, address: int, size: int, key: int) -> None:
        self.noise = (self.noise * 1103515245 + 12345) % 2**31
        self.clock += 4 + self.noise % 29
        index, phase = self.at
        if action in ("segment_alloc", "segment_map"):
            self.segment_frames.setdefault(address, index)
        self.entries.append({
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": self.clock,
            "compile_context": "N/A", "user_metadata": "", "frames": self.frames(index), "pool_id": (0, 0),
        })
        self.keys.append(key)
        self.phases.append(phase)

    def run(self) -> None:
        for kind, key, index, phase in self.stream.steps:
            self.at = (index, phase)
            if kind == "m":
                self._mark(self.stream.marks[key])
            elif kind == "a":
                if not self._born(key, index):
                    return
            elif key in self.address:
                self._died(key)

    def _mark(self, name: str) -> None:
        if name == "train":
            self.train_entry = len(self.entries)
        stage, _, rest = name.partition(":")
        if stage in ("START", "END"):
            self.annotations.append(
                {"stage": stage, "name": rest, "device": self.variant.device, "time_us": self.clock})

    def _born(self, key: int, index: int) -> bool:
        size = self.stream.sizes[key]
        try:
            self.address[key] = self.heap.malloc(size)
        except HeapFull:
            self._out_of_memory(size, index)
            return False
        self.born_frames[key] = index
        self.write("alloc", self.address[key], size, key)
        return True

    def _died(self, key: int) -> None:
        address = self.address.pop(key)
        for action in ("free_requested", "free_completed"):
            self.write(action, address, self.stream.sizes[key], key)
        self.heap.free(address)

    def _out_of_memory(self, size: int, index: int) -> None:
        """Record the failed request, then free what the exception's way out frees."""
        room = self.heap.capacity - self.heap.reserved
        self.write("oom", 0, size, -1)
        entry = self.entries[-1]
        del entry["addr"]
        entry["device_free"] = room
        self.oom = {"requested_bytes": size, "device_free": room, "time_us": entry["time_us"],
                    "entry": len(self.entries) - 1, "phase": self.phases[-1]}
        self.at = (self._outermost(index), "other")
        staying = _STAYING if self.variant.unwind == "step" else ()
        if self.variant.unwind != "held":
            for key in list(self.address):
                category, detail = self.stream.labels[key]
                if category not in staying and detail != "workspace":
                    self._died(key)

    def _outermost(self, index: int) -> int:
        """Return the frames of whoever is left when the exception has passed: the script's main."""
        for frames in self.stream.frames:
            if len(frames) > 1 and str(frames[-1]["filename"]).startswith("/workspace"):
                self.stream.frames.append(frames[-2:])
                self.stream.frame_ops.append(("", ""))
                return len(self.stream.frames) - 1
        return index


def _segments(rec: _Recorder) -> list[dict[str, Any]]:
    """Return the final state, as ``_snapshot()["segments"]`` has it."""
    owner = {address: key for key, address in rec.address.items()}
    by_segment: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for block in sorted(rec.heap.blocks.values(), key=lambda b: b.address):
        key = owner.get(block.address)
        entry = {"address": block.address, "size": block.size, "requested_size": block.requested,
                 "state": "inactive" if key is None else "active_allocated",
                 "frames": [] if key is None else rec.frames(rec.born_frames[key])}
        by_segment[id(block.segment)].append(entry)
    out = []
    for s in sorted(rec.heap.segments, key=lambda s: s.address):
        blocks = by_segment[id(s)]
        active = [b for b in blocks if b["state"] != "inactive"]
        total = sum(b["size"] for b in active)
        out.append({
            "device": rec.variant.device, "address": s.address, "total_size": s.total, "allocated_size": total,
            "active_size": total, "requested_size": sum(b["requested_size"] for b in active), "stream": 0,
            "segment_type": "large" if s.large else "small", "segment_pool_id": (0, 0),
            "is_expandable": s.expandable, "frames": rec.frames(rec.segment_frames[s.first]), "blocks": blocks,
        })
    return out


def replay(stream: Stream, variant: Variant, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (snapshot, truth) of one run, recorded as ``variant`` says."""
    rec = _Recorder(stream, variant)
    rec.run()
    first = 0
    if variant.after_load:
        first = rec.train_entry or 0
    if variant.keep_last is not None:
        first = max(first, len(rec.entries) - variant.keep_last)
    traces: list[list[dict[str, Any]]] = [[] for _ in range(variant.n_devices)]
    traces[variant.device] = rec.entries[first:]
    segments = _segments(rec)
    for device in set(range(variant.n_devices)) - {variant.device}:
        other = _Recorder(_loading_part(stream), replace(variant, device=device, capacity=None))
        other.run()
        traces[device] = other.entries
        segments = _segments(other) + segments
    begin = rec.entries[first]["time_us"] if first else 0
    snapshot = {
        "segments": segments, "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if variant.expandable else "",
            "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": variant.expandable,
            "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "graph_capture_record_stream_reuse": False,
            "roundup_power2_divisions": {str(2**i): 0 for i in range(16)},
        },
        "external_annotations": [a for a in rec.annotations if a["time_us"] >= begin],
    }
    return snapshot, _truth(rec, first, about)


def _loading_part(stream: Stream) -> Stream:
    """Return what another device of the machine holds: the models, loaded and left there."""
    marks = [i for i, (kind, n, _, _) in enumerate(stream.steps) if kind == "m" and stream.marks[n] == "train"]
    return replace(stream, steps=stream.steps[: marks[0]])


def _truth(rec: _Recorder, first: int, about: dict[str, Any]) -> dict[str, Any]:
    """Walk the recorded window and note who was alive at each peak."""
    best = _peaks(rec, first)
    wanted = defaultdict(list)
    for name, (index, _, _) in best.items():
        wanted[index].append(name)
    shots: dict[str, dict[str, Any]] = {}
    live: dict[int, int] = {}
    for i, (entry, key) in enumerate(zip(rec.entries, rec.keys, strict=True)):
        if entry["action"] == "alloc":
            live[key] = entry["addr"]
        elif entry["action"] == "free_completed":
            del live[key]
        for name in wanted.get(i, ()) if i >= first else ():
            shots[name] = _shot(rec, i, first, live, best[name][2])
    return {
        **about, "variant": rec.variant.name, "device": rec.variant.device, "n_devices": rec.variant.n_devices,
        "entries": len(rec.entries) - first, "allocated_end": sum(rec.stream.sizes[k] for k in live),
        "reserved_end": rec.heap.reserved, "peak": shots["peak"],
        "phases": {name: shots.get(name) for name in PHASES}, "phase_spans": _spans(rec, first),
        "oom": None if rec.oom is None else {**rec.oom, "entry": rec.oom["entry"] - first},
    }


def _peaks(rec: _Recorder, first: int) -> dict[str, tuple[int, int, int]]:
    """Return for the whole window and each phase: (entry, bytes, instants with this total)."""
    best: dict[str, tuple[int, int, int]] = {}
    total = 0
    for i, (entry, key) in enumerate(zip(rec.entries, rec.keys, strict=True)):
        if entry["action"] == "alloc":
            total += rec.stream.sizes[key]
        elif entry["action"] == "free_completed":
            total -= rec.stream.sizes[key]
        if i < first or entry["action"] != "alloc":
            continue
        for name in ("peak", rec.phases[i]):
            entry_best, top, count = best.get(name, (i, -1, 0))
            if total > top:
                best[name] = (i, total, 1)
            elif total == top:
                best[name] = (entry_best, top, count + 1)
    return best


def _shot(rec: _Recorder, i: int, first: int, live: dict[int, int], instants: int) -> dict[str, Any]:
    rows = [(address, rec.stream.sizes[key], *rec.stream.labels[key]) for key, address in live.items()]
    categories: Counter[str] = Counter()
    details: Counter[str] = Counter()
    for _, size, category, detail in rows:
        categories[category] += size
        plain = category in ("activations", "activation_gradients", "loss_logits", "kv_cache", "temporaries")
        details[f"{category}/{detail}" if plain and detail else category] += size
    return {
        "time_us": rec.entries[i]["time_us"], "entry": i - first, "phase": rec.phases[i],
        "allocated_bytes": sum(r[1] for r in rows),
        "allocated_bytes_rounded": sum(rec.heap.rounded(r[1]) for r in rows), "instants_with_this_total": instants,
        "by_category": dict(categories.most_common()), "by_detail": dict(details.most_common()),
        "live": [list(r) for r in rows],
    }


def _spans(rec: _Recorder, first: int) -> list[list[Any]]:
    spans: list[list[Any]] = []
    for entry, phase in zip(rec.entries[first:], rec.phases[first:], strict=True):
        if not spans or spans[-1][0] != phase:
            spans.append([phase, entry["time_us"], entry["time_us"]])
        spans[-1][2] = entry["time_us"]
    return spans


def write(folder: Path, name: str, snapshot: dict[str, Any], truth: dict[str, Any]) -> Path:
    """Write ``name.pickle`` and ``name.pickle.truth.json.gz``, each under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pickle"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    part.replace(path)
    beside = folder / f"{name}.pickle.truth.json.gz"
    with gzip.open(part, "wt") as text:
        json.dump({"file": path.name, **truth}, text)
    part.replace(beside)
    return path
