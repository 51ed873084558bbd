"""Label what every recorded storage was for: by identity, then by run-time context, then by shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from benchmarks.truth.scale import Scale
from benchmarks.truth.trace.stacks import Context, context_of
from benchmarks.truth.trace.tracer import Storage, Tracer

Label = tuple[str, str]
_OWNED = ("weights", "adapters", "reference_model", "reward_model")


def label_all(tracer: Tracer, scale: Scale) -> list[Label]:
    """Return one (category, detail) for each storage."""
    contexts = [context_of(raw) for raw in tracer.stacks]
    weight_grads = _weight_grads(tracer, contexts)
    starts = [i for i, (kind, n, _, _) in enumerate(tracer.events) if kind == "m" and tracer.marks[n] == "backward"]
    births = {n: i for i, (kind, n, _, _) in enumerate(tracer.events) if kind == "a"}
    deaths = {n: i for i, (kind, n, _, _) in enumerate(tracer.events) if kind == "f"}
    out: list[Label] = []
    for s in tracer.storages:
        saved = _survives(births[s.number], deaths.get(s.number), starts)
        out.append(_label(s, contexts[s.stack], tracer, scale, weight_grads, saved))
    return out


def _survives(birth: int, death: int | None, starts: Sequence[int]) -> bool:
    """Tell whether a storage is alive when the next backward starts."""
    position = bisect_left(starts, birth)
    return position < len(starts) and (death is None or death > starts[position])


def _weight_grads(tracer: Tracer, contexts: Sequence[Context]) -> set[int]:
    """Find storages of backward that were cast into or added to what became a ``.grad``."""
    found: set[int] = set()
    pending = [s.number for s in tracer.storages if s.mark and s.mark[0] == "gradients"]
    while pending:
        child = tracer.storages[pending.pop()]
        for number in {*child.parents, *child.feeds}:
            parent = tracer.storages[number]
            near = parent.phase == "backward" and contexts[parent.stack].backward
            same = sorted(parent.shape) == sorted(child.shape)
            if number not in found and near and same and parent.mark is None:
                found.add(number)
                pending.append(number)
    return found


def _label(s: Storage, c: Context, tracer: Tracer, scale: Scale, weight_grads: set[int], saved: bool) -> Label:
    if s.mark is not None:
        return s.mark
    if s.op == "aten._to_copy" and s.dtype.is_floating_point:
        for number in s.parents:
            parent = tracer.storages[number]
            if parent.mark and parent.mark[0] in _OWNED and parent.dtype != s.dtype:
                return ("weight_casts", f"{parent.mark[0]}:{parent.mark[1]}")
    if s.phase == "load":
        return ("temporaries", "load")
    logits = scale.is_vocabulary(s.shape) and s.dtype.is_floating_point
    if c.backward and not c.recompute:
        if logits:
            return ("loss_logits", "backward")
        return ("activation_gradients", "weight_grad" if s.number in weight_grads else "scratch")
    if c.recompute:
        return ("loss_logits", "backward") if logits else ("activations", "recomputed")
    if c.clip:
        return ("temporaries", "clip")
    if c.optimizer or s.phase == "optimizer_step":
        return ("temporaries", "optimizer")
    life = _life(s, saved)
    if logits:
        return ("loss_logits", "sampling" if s.phase == "generate" else life)
    if s.boundary:
        return ("activations", "boundary")
    if c.in_module and not c.between_modules:
        return ("activations", life)
    return _outside(s, c, scale, life)


def _life(s: Storage, saved: bool) -> str:
    if s.phase != "forward":
        return "no_grad"
    return "saved" if saved else "transient"


def _outside(s: Storage, c: Context, scale: Scale, life: str) -> Label:
    """Label what is born outside the modules: loss code, rollout code, the rest."""
    if not s.dtype.is_floating_point:
        return ("inputs", "")
    if c.between_modules and scale.has_hidden(s.shape):
        return ("activations", life)
    if c.in_logprob or c.between_modules:
        return ("loss_logits", life)
    return ("temporaries", "other")
