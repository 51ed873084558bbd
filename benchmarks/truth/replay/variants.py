"""List which recordings are written of each run, and repeat a run's stream."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.truth.replay.emit import Stream, Variant
from benchmarks.truth.replay.heap import Heap

# What else is written of each run with --variants: the ways a recording can be less than whole.
_DERIVED: dict[str, tuple[Variant, ...]] = {
    "c1_lora_ckpt": (Variant("after_load", after_load=True), Variant("cxx", cxx=True),
                     Variant("after_load_cxx", after_load=True, cxx=True)),
    "c1b_lora_moved": (Variant("after_load", after_load=True),),
    "c2_full_fp32_autocast_ref": (Variant("ring", keep_last=24_000), Variant("oom_step", unwind="step")),
    "c3_accumulation": (Variant("device1of2", device=1, n_devices=2), Variant("after_load", after_load=True)),
    "c4_reward_model": (Variant("expandable", expandable=True), Variant("ring", keep_last=30_000)),
    "c5a_nano_cat_tied_sgd": (Variant("after_load", after_load=True), Variant("oom_held", unwind="held")),
    "c5b_nano_static_adamw": (Variant("oom_all", unwind="all"), Variant("ring", keep_last=12_000)),
    "c7_small_model_long": (Variant("after_load_ring", after_load=True, keep_last=25_000),),
    "c8_full_logits": (Variant("oom_held", unwind="held"), Variant("cxx_ring", keep_last=30_000, cxx=True)),
    "c6_generation_kv": (Variant("after_load", after_load=True), Variant("cxx_expandable", cxx=True, expandable=True)),
}


def variants_of(name: str, stream: Stream, derived: bool) -> list[tuple[Variant, Stream]]:
    """Yield the plain recording, and with ``derived`` the lesser ones."""
    out = [(Variant(), stream)]
    for variant in _DERIVED.get(name, ()) if derived else ():
        if variant.name.startswith("oom"):
            # Less than the run holds at its peak: it dies on the way there, however well the cache is used.
            variant = replace(variant, capacity=int(live_peak(stream) * 0.97))
        out.append((variant, stream))
    return out


def live_peak(stream: Stream) -> int:
    """Return the most bytes the run holds, in blocks."""
    total = best = 0
    for kind, key, _, _ in stream.steps:
        size = Heap.rounded(stream.sizes[key]) if kind != "m" else 0
        total += size if kind == "a" else -size
        best = max(best, total)
    return best


def repeated(stream: Stream, times: int) -> Stream:
    """Play the run's last whole step (from one optimizer step's end to the next's) ``times`` more."""
    ends = [i for i, (kind, n, _, _) in enumerate(stream.steps) if kind == "m" and stream.marks[n].startswith("END")]
    if len(ends) < 2:
        raise ValueError("the run has no whole step between two optimizer steps")
    first, last = ends[-2], ends[-1]
    body = stream.steps[first:last]
    born = {key for kind, key, _, _ in body if kind == "a"}
    died = {key for kind, key, _, _ in body if kind == "f"}
    out = Stream(stream.steps[:last], list(stream.sizes), list(stream.labels), stream.frames, stream.marks,
                 stream.frame_ops)
    # What one round leaves behind the next frees at its start (gradients, by zero_grad).
    tail = stream.steps[last:]
    left = [step for step in tail if step[0] == "f" and step[1] in born]
    for _ in range(times):
        names: dict[int, int] = {}
        out.steps += left
        left = []
        for kind, key, frames, phase in body:
            if kind == "a":
                names[key] = out.add(stream.sizes[key], stream.labels[key])
                if key not in died:
                    left.append(("f", names[key], frames, phase))
            elif kind == "f" and key not in born:
                continue
            out.steps.append((kind, names.get(key, key) if kind != "m" else key, frames, phase))
    out.steps += left + [step for step in tail if step[0] != "f" or step[1] not in born]
    return out


def to_length(stream: Stream, entries: int) -> Stream:
    """Repeat the run until its trace has about ``entries`` entries (an allocation is one, a free two)."""
    weight = {"a": 1, "f": 2, "m": 0}
    have = sum(weight[kind] for kind, *_ in stream.steps)
    once = sum(weight[kind] for kind, *_ in repeated(stream, 1).steps) - have
    return repeated(stream, max(0, -(-(entries - have) // once)))
