"""DeepSpeed's ZeRO on one of many ranks, modelled: what its engine holds, when it takes it and when it gives it back.

DeepSpeed needs a GPU to start, so none of it runs. Its rules are read from the sources of release 0.19
(``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``) and put in as hooks
around the model and the optimizer that *are* executed: forward, backward and the optimizer's step over this rank's
partition. Parameters and gradients are bfloat16, as they are with ``bf16`` enabled; master weights and moments float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memprof.simulate.settings import Settings
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.session import FakeSession

__all__ = ["HALF", "Partition", "ZeroEngine", "ZeroOptimizer", "trainable_of"]

_ALIGNMENT = 2  # elements a rank's share starts at a multiple of (``nccl_start_alignment_factor``)
HALF = 2  # bytes of an element


def trainable_of(model: Any) -> list[Any]:
    """Parameters that have gradients, tied ones once."""
    return [p for p in model.parameters() if p.requires_grad]


class Partition:
    """One flat piece of this rank's float32 master weights, ``numel`` elements of them."""

    def __init__(self, numel: int, session: FakeSession) -> None:
        self.numel = numel
        self.master = torch.nn.Parameter(torch.empty(numel))
        session.book.claim(self.master, Category.OPTIMIZER_STATE, None, "master weights")


class ZeroEngine:
    """What ZeRO-1 and ZeRO-2 hold on one rank.

    * weights: every trainable parameter in one flat bfloat16 buffer, whole on every rank;
    * optimizer state: master weights and moments of one part in ``world``;
    * communication: a bucket of ``reduce_bucket_size`` elements while there are gradients to reduce;
    * gradients: all of them until the step (stage 1); dropped as they are reduced, and one part kept (stage 2).

    New weights are gathered in place. Call :meth:`backward` around each backward.
    """

    def __init__(self, model: Any, settings: Settings, session: FakeSession) -> None:
        self.session, self.recorder = session, session.fake_recorder
        self.stage = int(settings.sharding.removeprefix("zero"))
        self.world = settings.gpus
        self.bucket_size = settings.reduce_bucket_size
        self.params = trainable_of(model)
        self._held: dict[str, int] = {}
        self._in_bucket = 0
        self._take_weights(model)
        self.partitions = self._make_partitions()
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def part(self) -> int:
        """Elements of this rank's share."""
        step = _ALIGNMENT * self.world
        return int(-(-sum(p.numel() for p in self.params) // step) * step // self.world)

    def _take_weights(self, model: Any) -> None:
        self.hold("flat", self.part * self.world * HALF, Category.WEIGHTS, "flat weights")
        for parameter in self.params:  # they are views of the flat buffer from here on
            self.recorder.disown(parameter)

    def _make_partitions(self) -> list[Partition]:
        return [Partition(self.part, self.session)]

    def gathered(self) -> AbstractContextManager[None]:
        """A context with all weights whole; they always are."""
        return nullcontext()

    # -- memory ------------------------------------------------------------------------------------------------

    def hold(self, key: str, nbytes: int, category: Category, name: str, detail: str | None = None) -> None:
        """Take memory known by ``key``, once."""
        if key not in self._held and nbytes:
            self._held[key] = self.recorder.hold(nbytes, category, self.session.book, name, detail)

    def let_go(self, *keys: str) -> None:
        """Give back what is held by these keys."""
        for key in keys:
            if (address := self._held.pop(key, None)) is not None:
                self.recorder.release(address)

    # -- gradients ---------------------------------------------------------------------------------------------

    def backward(self, run: Any) -> Any:
        """``run()``, and what the engine does once all gradients are there."""
        result = run()
        if self.stage > 1:
            self._reduce()
            self.let_go("bucket")
            if "accumulated" in self._held:
                self.let_go("part")
            elif "part" in self._held:
                self._held["accumulated"] = self._held.pop("part")
        return result

    def _ready(self, parameter: Any) -> None:
        self._take_bucket()
        if self.stage > 1:
            if self._in_bucket + parameter.numel() > self.bucket_size:
                self._reduce()
            self._in_bucket += parameter.numel()
            parameter.grad = None

    def _take_bucket(self) -> None:
        self.hold("bucket", self.bucket_size * HALF, Category.COMMUNICATION, "reduce bucket")

    def _reduce(self) -> None:
        self._in_bucket = 0
        self.hold("part", self.part * HALF, Category.GRADIENTS, "this rank's gradients", "sharded")

    # -- the step ----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Stage 1 reduces all gradients now, and keeps this rank's."""
        if self.stage == 1:
            self._reduce()
            self._held["accumulated"] = self._held.pop("part")
            for parameter in self.params:
                parameter.grad = None
            self.let_go("bucket")

    def master_gradient(self, partition: Partition) -> None:
        """This rank's gradients, flattened and then in float32."""
        self.hold("flattened", partition.numel * HALF, Category.GRADIENTS, "flattened gradients", "sharded")
        gradient = torch.empty_like(partition.master)
        self.session.book.claim(gradient, Category.GRADIENTS, "sharded", "master gradients")
        self._drop_flattened()
        partition.master.grad = gradient

    def _drop_flattened(self) -> None:
        self.let_go("flattened", "accumulated")


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer over this rank's partitions, stepped one after the other.

    Args:
        engine: whose partitions.
        kind, arguments: the optimizer that is executed.
    """

    def __init__(self, engine: ZeroEngine, kind: type, arguments: dict[str, Any]) -> None:
        self._engine = engine
        self.inner = kind([p.master for p in engine.partitions], **arguments)
        super().__init__([p.master for p in engine.partitions], {"lr": arguments.get("lr", 0.0)})
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every partition."""
        self._engine.before_step()
        for partition in self._engine.partitions:
            self._engine.master_gradient(partition)
            self.inner.step()
            partition.master.grad = None
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are gone by now."""
        for parameter in self._engine.params:
            parameter.grad = None
