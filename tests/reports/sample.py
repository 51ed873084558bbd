"""A report and its series made by hand: a small GRPO run told event by event, so that every sum is known.

Not a recording. The numbers are those of a 1.5B model trained with LoRA on a 24 GB card, simplified; the figures the
tests expect are worked out from this script, never from the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.vocabulary import GROUP_OF, Category, Evidence, Group

MIB = 2**20

# At the peak of the story: four layers of weights, and the second micro-batch's backward with its logits twice.
PEAK = {
    "weights": 4 * 700,
    "adapters": 36,
    "workspace": 32,
    "unattributed": 5,
    "optimizer_state": 72,
    "inputs": 4,
    "gradients": 36,
    "activations": 4 * 320,
    "loss_logits": 2 * 1220,
    "activation_gradients": 240,
}

_SITE = "/opt/venv/lib/python3.11/site-packages"
_STACKS = {
    "weights": [f"{_SITE}/transformers/modeling_utils.py:5021 from_pretrained", "/home/ada/train.py:31 main"],
    "kv_cache": [
        f"{_SITE}/transformers/cache_utils.py:118 update",
        f"{_SITE}/transformers/models/qwen2/modeling_qwen2.py:171 forward",
        f"{_SITE}/trl/trainer/grpo_trainer.py:1342 _generate",
        "/home/ada/train.py:31 main",
    ],
    "activations": [
        f"{_SITE}/torch/nn/modules/linear.py:134 forward",
        f"{_SITE}/transformers/models/qwen2/modeling_qwen2.py:46 forward",
        f"{_SITE}/trl/trainer/grpo_trainer.py:1790 _compute_loss",
        "/home/ada/train.py:31 main",
    ],
    "loss_logits": [
        f"{_SITE}/trl/kernels/chunked_logprob.py:88 forward",
        f"{_SITE}/trl/trainer/grpo_trainer.py:1790 _compute_loss",
        "/home/ada/train.py:31 main",
    ],
    "optimizer_state": [f"{_SITE}/torch/optim/adamw.py:143 _init_group", "/home/ada/train.py:31 main"],
}
_RULES = {
    "kv_cache": ("stack", "transformers.cache"),
    "activations": ("stack", "model.forward"),
    "loss_logits": ("shape", "vocabulary_wide"),
    "activation_gradients": ("lifetime", "born_in_backward"),
    "unattributed": ("none", None),
}


@dataclass
class _Block:
    name: str
    mib: int
    category: str
    detail: str | None
    phase: str
    born_us: int | None
    address: int
    died_us: int | None = None


@dataclass
class Run:
    """Events in order; memory after each is kept as the series."""

    clock: int = 1_000_000
    phase: str = "load"
    step: int | None = None
    live: dict[str, _Block] = field(default_factory=dict)
    dead: list[_Block] = field(default_factory=list)
    points: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    held_at_peak: list[_Block] = field(default_factory=list)
    peak_point: int = 0

    def begin(self, phase: str, step: int | None) -> None:
        self.end()
        self.phase, self.step = phase, step
        self.spans.append(
            {"phase": phase, "step": step, "within": None, "start_us": self.clock, "start_point": len(self.points)}
        )

    def end(self) -> None:
        if self.spans and "end_us" not in self.spans[-1]:
            self.spans[-1] |= {"end_us": self.clock, "end_point": len(self.points)}

    def alloc(self, name: str, mib: int, category: str, detail: str | None = None, us: int = 1000) -> None:
        address = 0x7F0000000000 + 2 * MIB * len(self.points)
        self.live[name] = _Block(name, mib, category, detail, self.phase, self.clock, address)
        self._tick(us)

    def free(self, *names: str, us: int = 1000) -> None:
        for name in names:
            block = self.live.pop(name)
            block.died_us = self.clock
            self.dead.append(block)
            self._tick(us)

    def _tick(self, us: int) -> None:
        self.clock += us
        totals = dict.fromkeys(map(str, Category), 0)
        for block in self.live.values():
            totals[block.category] += block.mib * MIB
        self.points.append((self.clock, totals))
        if sum(totals.values()) > sum(self.points[self.peak_point][1].values()):
            self.peak_point = len(self.points) - 1
            self.held_at_peak = list(self.live.values())


def _story(run: Run, steps: int) -> None:
    run.begin("load", None)
    for layer in range(4):
        run.alloc(f"model.layers.{layer}.mlp.up_proj.weight", 700, "weights", us=60_000)
    run.alloc("lora", 36, "adapters")
    run.alloc("cublas", 32, "workspace")
    run.alloc("mystery", 5, "unattributed")
    for step in range(1, steps + 1):
        run.begin("generate", step)
        for block in range(12):
            run.alloc(f"cache.{block}", 40, "kv_cache", "keys" if block % 2 else "values", us=400_000)
        run.alloc("tokens", 3, "inputs")
        run.free(*[f"cache.{block}" for block in range(12)], us=200)
        run.begin("reward", step)
        run.alloc("rewards", 1, "inputs", us=30_000)
        run.begin("old_logprobs", step)
        run.alloc("old_logits", 610, "loss_logits", "old", us=40_000)
        run.free("old_logits")
        for micro in range(2):
            run.begin("forward", step)
            for layer in range(4):
                run.alloc(f"saved.{layer}", 310 + 10 * micro, "activations", "saved", us=9_000)
            run.alloc("logits", 1220, "loss_logits", "policy", us=11_000)
            run.begin("backward", step)
            run.alloc("dlogits", 1220, "loss_logits", "policy", us=11_000)
            for layer in reversed(range(4)):
                run.alloc(f"scratch.{layer}", 240, "activation_gradients", "scratch", us=7_000)
                if not micro:
                    run.alloc(f"grad.{layer}", 9, "gradients", us=500)
                if layer == 3:
                    run.free("logits", "dlogits")
                run.free(f"scratch.{layer}", f"saved.{layer}")
        run.begin("optimizer_step", step)
        if step == 1:
            run.alloc("exp_avg", 36, "optimizer_state")
            run.alloc("exp_avg_sq", 36, "optimizer_state")
        run.alloc("update", 36, "temporaries", us=20_000)
        run.free("update", *[f"grad.{layer}" for layer in range(4)], "tokens", "rewards")
    run.end()


def _allocation(block: _Block) -> dict[str, Any]:
    evidence, rule = _RULES.get(block.category, ("owner", None))
    return {
        "address": block.address,
        "bytes": block.mib * MIB,
        "requested_bytes": block.mib * MIB - 512,
        "category": block.category,
        "detail": block.detail,
        "name": block.name if evidence == "owner" else None,
        "evidence": evidence,
        "rule": rule,
        "alternatives": ["temporaries"] if block.category == "activation_gradients" else [],
        "phase": block.phase,
        "step": None,
        "born_us": block.born_us,
        "died_us": block.died_us,
        "retained": block.category in ("weights", "adapters"),
        "tag": "memprof:phase=load;shape=8960x1536;dtype=bfloat16" if block.category == "weights" else None,
        "stack": _STACKS.get(block.category, []),
    }


def _phases(run: Run) -> list[dict[str, Any]]:
    found = []
    for span in run.spans:
        inside = run.points[span["start_point"] : span["end_point"]]
        time_us, totals = max(inside, key=lambda p: sum(p[1].values()))
        found.append(
            {
                **{k: span[k] for k in ("phase", "step", "within", "start_us", "end_us")},
                "peak_bytes": sum(totals.values()),
                "peak_allocated_bytes": sum(totals.values()),
                "peak_reserved_bytes": None,
                "peak_time_us": time_us,
                "categories": {c: n for c, n in totals.items() if n},
            }
        )
    return found


def _peak(run: Run, kind: str, pending: int) -> dict[str, Any]:
    time_us, totals = run.points[run.peak_point]
    active = sum(totals.values())
    details: dict[str, dict[str, int]] = {}
    evidence = dict.fromkeys(map(str, Evidence), 0)
    requested = dict.fromkeys(map(str, Category), 0)
    guessed: dict[str, int] = {}
    for block in run.held_at_peak:
        evidence[_allocation(block)["evidence"]] += block.mib * MIB
        if _allocation(block)["evidence"] in ("lifetime", "shape"):
            guessed[block.category] = guessed.get(block.category, 0) + block.mib * MIB
        requested[block.category] += block.mib * MIB - 512
        if block.detail:
            of_category = details.setdefault(block.category, {})
            of_category[block.detail] = of_category.get(block.detail, 0) + block.mib * MIB
    groups = dict.fromkeys(map(str, Group), 0)
    for category, n in totals.items():
        groups[str(GROUP_OF[Category(category)])] += n
    groups["total"] = active
    span = next(s for s in run.spans if s["start_point"] <= run.peak_point < s["end_point"])
    rounding = 512 * len(run.held_at_peak)
    trace = kind == "trace"
    cached, split = (0, 0) if trace else (900 * MIB, 120 * MIB)
    blocks = sorted(run.held_at_peak, key=lambda b: -b.mib)
    return {
        "allocated_bytes": active - pending,
        "active_bytes": active,
        "requested_bytes": active - pending - rounding,
        "reserved_bytes": None if trace else active + cached + split,
        "time_us": time_us,
        "step": span["step"],
        "phase": span["phase"],
        "categories": totals,
        "categories_requested": requested,
        "details": details,
        "groups": groups,
        "evidence": evidence,
        "guessed": guessed,
        "rounding_bytes": rounding,
        "pending_free_bytes": pending,
        "cached_bytes": cached,
        "inactive_split_bytes": split,
        "private_pool_bytes": 0,
        "unmapped_bytes": 0,
        "non_torch_bytes": None if trace else 480 * MIB,
        "allocations": [_allocation(b) for b in blocks],
    }


def _source(kind: str, n_points: int) -> dict[str, Any]:
    trace = kind == "trace"
    return {
        "files": ["runs/step-000002.rank-0.pickle"],
        "kind": kind,
        "device": 0,
        "device_name": "cpu" if trace else "NVIDIA GeForce RTX 4090",
        "device_total_bytes": None if trace else 25_386_352_640,
        "torch": "2.13.0",
        "versions": {"memprof": "0.1.0", "torch": "2.13.0", "trl": "1.16.0"},
        "events": n_points,
        "dropped_events": 0,
        "history": "complete",
        "timed": kind != "simulated",
        "phases_known_by": "marks",
        "devices": [0],
        "rank": 0,
        "world_size": 1,
        "config": {"model": "Qwen/Qwen2.5-1.5B-Instruct", "num_generations": 8, "beta": 0.0, "lora_r": 16},
    }


def sample(kind: str = "cuda", steps: int = 2, pending_mib: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(report, series)``: what ``Analysis.to_dict`` and ``Analysis.series`` would give for this story."""
    run = Run()
    _story(run, steps)
    peak = _peak(run, kind, pending_mib * MIB)
    totals = [p[1] for p in run.points]
    used = {c: max(t[c] for t in totals) for c in totals[0]}
    trace = kind == "trace"
    reserved = None if trace else peak["reserved_bytes"] + 200 * MIB
    report = {
        "schema": "memprof.report/1",
        "source": _source(kind, len(run.points)),
        "peak": peak,
        "device_peak": {
            "reserved_bytes": reserved,
            "non_torch_bytes": None if trace else 480 * MIB,
            "time_us": None if trace else peak["time_us"],
            "step": None if trace else peak["step"],
            "phase": None if trace else peak["phase"],
            "grown_by": []
            if reserved is None
            else [
                {"bytes": reserved - 2400 * MIB, "phase": "load", "stack": _STACKS["weights"]},
                {"bytes": 2400 * MIB, "phase": "backward", "stack": _STACKS["loss_logits"]},
            ],
        },
        "max_requested_bytes": peak["requested_bytes"],
        "own_peaks": used,
        "group_own_peaks": _group_own_peaks(totals),
        "phases": _phases(run),
        "host": {
            "rss_bytes": 3 * 2**30,
            "pinned_bytes": 256 * MIB,
            "pinned_requested_bytes": 160 * MIB,
            "managed_bytes": None,
        },
        "oom": None,
        "advice": [],
        "ranks": [],
        "notes": ["Recording began after the tokenizer was loaded."],
    }
    series = {
        "instant": list(range(len(run.points))),
        "time_us": [p[0] for p in run.points],
        "phase_spans": run.spans,
        "categories": {c: [t[c] for t in totals] for c in used if used[c]},
        "reserved": None if trace else [min(reserved or 0, sum(t.values()) + 1020 * MIB) for t in totals],
        "peak_point": run.peak_point,
    }
    return report, series


def _group_own_peaks(totals: list[dict[str, int]]) -> dict[str, int]:
    peaks = dict.fromkeys(map(str, Group), 0)
    for at_instant in totals:
        groups = dict.fromkeys(map(str, Group), 0)
        for category, n in at_instant.items():
            groups[str(GROUP_OF[Category(category)])] += n
        groups["total"] = sum(at_instant.values())
        peaks = {g: max(peaks[g], groups[g]) for g in peaks}
    return peaks


HOSTILE = (
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>'",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "[bold red]markup[/bold red] [link=http://x]y[/link]",
    "`a` | **b** @everyone #1 [text](http://x)",
    "left\u202eright\u2028line\nfeed\r\x00",
    "a\ud800b",
)


def hostile() -> tuple[dict[str, Any], dict[str, Any]]:
    """The sample with every name a stranger can choose replaced by something that tries to break out."""
    report, series = sample()
    for i, allocation in enumerate(report["peak"]["allocations"]):
        words = HOSTILE[i % len(HOSTILE)]
        allocation |= {"name": words, "rule": words, "detail": words, "tag": f"memprof:shape={words};dtype={words}"}
        allocation["stack"] = [f"/x/{word}.py:1 {word}" for word in HOSTILE]
    report["peak"]["details"] = {"activations": {HOSTILE[0]: MIB}}
    report["source"] |= {"files": ["/x/" + HOSTILE[1]], "device_name": HOSTILE[2], "torch": HOSTILE[0]}
    report["source"]["config"] = {**{f"key{w}": w for w in HOSTILE}, "model": HOSTILE[0]}
    report["source"]["versions"] = {HOSTILE[3]: HOSTILE[4]}
    report["device_peak"]["grown_by"][0]["stack"] = list(HOSTILE)
    report["oom"] = {"requested_bytes": 1, "device_free_bytes": 1, "phase": "load", "step": 1, "stack": list(HOSTILE)}
    report["notes"] = list(HOSTILE)
    report["advice"] = [
        {"action": w, "setting": w, "saves_bytes": MIB, "costs": w, "exact": True, "basis": "estimated", "id": w}
        for w in HOSTILE
    ]
    return report, series
