"""A small training run written event by event, with the stacks a real one has.

Sizes are those of a tied model of three layers, hidden size 256, vocabulary 30011, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memprof.attribution.pipeline import attribute
from memprof.attribution.result import Attribution
from memprof.attribution.rules import RuleSet
from memprof.snapshot import Snapshot, snapshot_from_raw
from memprof.timeline.timeline import Timeline, build_timeline
from memprof.vocabulary import Category
from tests.synthetic import Raw, SnapshotBuilder, frame

HIDDEN, VOCABULARY, LAYERS = 256, 30011, 3
NORM = HIDDEN * 4
MATRIX = HIDDEN * HIDDEN * 4
EMBEDDING = VOCABULARY * HIDDEN * 4
PARAMETERS = (
    [EMBEDDING] + [s for _ in range(LAYERS) for s in (NORM, MATRIX, MATRIX, NORM, 4 * MATRIX, 4 * MATRIX)] + [NORM]
)
TOKENS = 100
HIDDEN_STATES = TOKENS * HIDDEN * 4
LOGITS = TOKENS * VOCABULARY * 4

MAIN = ["train.py:90 main", "train.py:99 <module>"]
CALL = "torch/nn/modules/module.py:1789 _call_impl"
LOAD = [
    "torch/nn/modules/module.py:1369 convert",
    "torch/nn/modules/module.py:964 _apply",
    "torch/nn/modules/module.py:1383 to",
]
LAYER = ["torch/nn/modules/linear.py:134 forward", CALL, "model.py:40 forward", CALL, "model.py:60 forward", CALL]
HEAD = ["torch/nn/modules/linear.py:134 forward", CALL, "model.py:70 forward", CALL]
LOSS = ["train.py:30 compute_loss"]
GENERATE = ["train.py:10 generate"]
MAKE_GRADS = [
    "torch/autograd/__init__.py:233 _make_grads",
    "torch/autograd/__init__.py:388 backward",
    "torch/_tensor.py:623 backward",
]
INIT_GROUP = ["torch/optim/adam.py:178 _init_group", "torch/optim/adam.py:238 step"]
CLIP = ["torch/nn/utils/clip_grad.py:95 _get_total_norm", "torch/nn/utils/clip_grad.py:230 clip_grad_norm_"]
ZERO_GRAD = ["torch/optim/optimizer.py:1062 zero_grad"]


def frames(texts: list[str]) -> list[Raw]:
    """Frames of ``file:line function`` texts."""
    out = []
    for text in texts:
        place, _, function = text.partition(" ")
        file, _, line = place.rpartition(":")
        out.append(frame(function, file, int(line)))
    return out


@dataclass
class Result:
    """An attributed snapshot."""

    snapshot: Snapshot
    timeline: Timeline
    said: Attribution

    def category(self, address: int) -> Category:
        """The category of the last allocation at an address."""
        row = [i for i in range(len(self.timeline)) if self.timeline.address[i] == address][-1]
        return list(Category)[self.said.category[row]]

    def rule(self, address: int) -> str:
        """The rule that decided the last allocation at an address."""
        row = [i for i in range(len(self.timeline)) if self.timeline.address[i] == address][-1]
        return self.said.rules[self.said.rule[row]]

    def phases(self) -> list[str]:
        """The phases in order, neighbours joined."""
        return [
            s.phase
            for i, s in enumerate(self.said.track.spans)
            if not i or self.said.track.spans[i - 1].phase != s.phase
        ]


@dataclass
class Run:
    """What :class:`SnapshotBuilder` writes, with stacks given in words, and what each address is."""

    builder: SnapshotBuilder = field(default_factory=SnapshotBuilder)
    truth: dict[int, Category] = field(default_factory=dict)

    def alloc(self, size: int, stack: list[str], category: Category | None = None, metadata: str = "") -> int:
        """Allocate under a stack, innermost frame first."""
        address = self.builder._block(size, frames(stack))
        self.builder._event("alloc", address, size, frames(stack), metadata)
        if category is not None:
            self.truth[address] = category
        return address

    def ghost(self, size: int, category: Category) -> int:
        """Something older than the recording."""
        address = self.builder.ghost(size)
        self.truth[address] = category
        return address

    def free(self, address: int, stack: list[str] | None = None) -> None:
        """Free under a stack."""
        size = self.builder.live[address]["requested_size"]
        self.builder._event("free_requested", address, size, frames(stack or []))
        self.builder._event("free_completed", address, size, frames(stack or []))
        del self.builder.live[address]

    def load(self, line: int, category: Category, stack: list[str] | None = None) -> list[int]:
        """Move a model to the device, called from a line of main."""
        return [self.alloc(s, [*(stack or LOAD), f"train.py:{line} main", MAIN[1]], category) for s in PARAMETERS]

    def generate(self, tokens: int = 6) -> None:
        """Decode with concatenated keys and values."""
        cache: list[list[int]] = [[] for _ in range(LAYERS)]
        for step in range(1, tokens + 1):
            for layer in cache:
                for old in layer:
                    self.free(old, MAIN)
                layer[:] = [self.alloc(step * 4 * NORM, [*LAYER, *GENERATE, *MAIN], Category.KV_CACHE) for _ in "kv"]
                self.free(self.alloc(3 * NORM, ["model.py:45 forward", CALL, *LAYER, *GENERATE, *MAIN]), MAIN)
        for layer in cache:
            for old in layer:
                self.free(old, MAIN)

    def no_grad_pass(self, line: int) -> None:
        """Log-probs without gradient from a line of main."""
        stack = ["train.py:20 get_logps", f"train.py:{line} main", MAIN[1]]
        self.free(self.alloc(HIDDEN_STATES, [*LAYER, *stack], Category.ACTIVATIONS), MAIN)
        self.free(self.alloc(LOGITS, stack, Category.LOSS_LOGITS), MAIN)

    def forward(self) -> list[int]:
        """The training forward: what is saved for backward."""
        saved = [self.alloc(HIDDEN_STATES, [*LAYER, *LOSS, *MAIN], Category.ACTIVATIONS) for _ in range(2 * LAYERS)]
        saved.append(self.alloc(LOGITS, [*HEAD, *LOSS, *MAIN], Category.LOSS_LOGITS))
        saved.append(self.alloc(LOGITS, ["train.py:31 log_softmax", *LOSS, *MAIN], Category.LOSS_LOGITS))
        return saved

    def backward(self, saved: list[int]) -> list[int]:
        """The backward, on a thread without frames: gradients."""
        one = self.alloc(4, [*MAKE_GRADS, *MAIN])
        logits = self.alloc(LOGITS, [], Category.LOSS_LOGITS)
        gradients = []
        for size in reversed(PARAMETERS):
            scratch = self.alloc(HIDDEN_STATES, [], Category.ACTIVATION_GRADIENTS)
            gradients.append(self.alloc(size, [], Category.GRADIENTS))
            self.free(scratch)
        for address in [*saved, logits, one]:
            self.free(address)
        return gradients

    def step(self, *, first: bool) -> None:
        """Clipping, and on the first step two moments a parameter."""
        norm = self.alloc(4, [*CLIP, *MAIN], Category.TEMPORARIES)
        for size in PARAMETERS if first else []:
            for _ in range(2):
                self.alloc(size, [*INIT_GROUP, *MAIN], Category.OPTIMIZER_STATE)
        self.free(norm, MAIN)

    def raw(self, extra: dict[str, Any] | None = None) -> Raw:
        """Torch's dict."""
        return self.builder.raw(extra)

    def attribute(self, extra: dict[str, Any] | None = None, rules: RuleSet | None = None) -> Result:
        """Read and attribute what was written."""
        snapshot = snapshot_from_raw(self.raw(extra))
        timeline = build_timeline(snapshot)
        return Result(snapshot, timeline, attribute(snapshot, timeline, rules))


def train(run: Run, steps: int = 2, *, reference: bool = True) -> None:
    """Generation, log-probs, forward, backward and optimizer step, ``steps`` times."""
    for step in range(steps):
        run.generate()
        run.no_grad_pass(60)
        if reference:
            run.no_grad_pass(61)
        gradients = run.backward(run.forward())
        run.step(first=step == 0)
        for address in gradients:
            run.free(address, [*ZERO_GRAD, *MAIN])
    run.alloc(64, ["train.py:95 main", MAIN[1]])
