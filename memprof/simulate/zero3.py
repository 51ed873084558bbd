"""ZeRO-3, modelled: parameters gathered before a module runs and let go after it, by DeepSpeed's own bookkeeping.

The order in which modules ran in the training pass before tells the coordinator what to gather ahead
(``stage3_prefetch_bucket_size``) and what not to let go because it comes again soon (``stage3_max_reuse_distance``,
``stage3_max_live_parameters``). Small parameters stay gathered (``stage3_param_persistence_threshold``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memprof.simulate.settings import Settings
from memprof.simulate.zero import HALF, Partition, ZeroEngine
from memprof.vocabulary import Category

__all__ = ["Coordinator", "Zero3Engine"]

_SUB_GROUP = 10**9  # elements stepped at once (``sub_group_size``)


class Coordinator:
    """Which parameters of one model are whole just now.

    Args:
        model: whose modules are watched.
        engine: where memory is taken.
        category: what its gathered parameters are.
        settings: the limits, in elements.
    """

    def __init__(self, model: Any, engine: Zero3Engine, category: Category, settings: Settings) -> None:
        self._engine, self._category = engine, category
        self._prefetch = settings.stage3_prefetch_bucket_size
        self._reuse, self._most = settings.stage3_max_reuse_distance, settings.stage3_max_live_parameters
        self._whole: dict[int, int] = {}  # id -> elements
        self._order: list[list[Any]] = []  # of this training pass
        self._known: list[list[Any]] = []  # of the one before
        self._ahead: deque[list[Any]] = deque()
        self._fixed = False
        self._sharded: list[Any] = []
        for parameter in model.parameters():
            if parameter.numel() < settings.stage3_param_persistence_threshold:
                engine.hold(_key(parameter), parameter.numel() * HALF, category, "persistent", "unsharded")
            else:
                self._sharded.append(parameter)
        big = {id(p) for p in self._sharded}
        for module in model.modules():
            mine = [p for p in module.parameters(recurse=False) if id(p) in big]
            if mine:
                self._watch(module, mine)

    def _watch(self, module: Any, mine: list[Any]) -> None:
        def before(_: Any, inputs: tuple[Any, ...]) -> Any:
            self.fetch(mine)
            return tuple(self._let_go_behind(value, mine) for value in inputs)

        def after(_: Any, inputs: Any, output: Any) -> None:
            self.release(mine)
            if isinstance(output, torch.Tensor) and output.requires_grad and torch.is_grad_enabled():
                output.register_hook(lambda grad: self.fetch(mine))  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _let_go_behind(self, value: Any, mine: list[Any]) -> Any:
        """A view of an input, whose gradient is there when the module's backward is over."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        view = value.view_as(value)
        view.register_hook(lambda grad: self.release(mine))  # type: ignore[no-untyped-call]
        return view

    @property
    def live(self) -> int:
        """Elements that are whole now, persistent ones apart."""
        return sum(self._whole.values())

    # -- as modules run ----------------------------------------------------------------------------------------

    def fetch(self, mine: list[Any]) -> None:
        """Make these whole, then gather what comes next where that is known."""
        if self._fixed:
            return
        self._gather(mine)
        if not _training():
            return
        self._order.append(mine)
        if self._ahead:
            self._ahead.popleft()
        if self._known:
            self._gather(self._soon())

    def _soon(self) -> list[Any]:
        found: dict[int, Any] = {}
        numel, room = 0, min(self._prefetch, self._most - self.live)
        for module in self._ahead:
            for parameter in module:
                if numel >= room:
                    return list(found.values())
                if id(parameter) not in self._whole and id(parameter) not in found:
                    found[id(parameter)] = parameter
                    numel += parameter.numel()
        return list(found.values())

    def _gather(self, wanted: Iterable[Any], *, together: bool = True) -> None:
        missing = [p for p in wanted if id(p) not in self._whole]
        if together and len(missing) > 1:  # into one buffer, then copied apart
            size = sum(p.numel() for p in missing) * HALF
            self._engine.hold("gather", size, Category.COMMUNICATION, "all-gather")
        for parameter in missing:
            self._whole[id(parameter)] = parameter.numel()
            size = parameter.numel() * HALF
            self._engine.hold(_key(parameter), size, self._category, "gathered", "unsharded")
        self._engine.let_go("gather")

    def release(self, mine: Iterable[Any]) -> None:
        """Let these go, unless they come again within the reuse distance."""
        if self._fixed:
            return
        kept = self._coming() if _training() and self._known else set()
        for parameter in mine:
            if id(parameter) not in kept and self._whole.pop(id(parameter), None) is not None:
                self._engine.let_go(_key(parameter))

    def _coming(self) -> set[int]:
        seen: set[int] = set()
        passed = 0
        for module in self._ahead:
            if passed >= self._reuse:
                break
            seen.update(id(p) for p in module)
            passed += sum(p.numel() for p in module)
        return seen

    # -- from outside ------------------------------------------------------------------------------------------

    def pass_over(self) -> None:
        """A training pass is over: the next is expected to go the same way; nothing stays whole."""
        self._known, self._order = self._order, []
        self._ahead = deque(self._known)
        self.release_all()

    def release_all(self) -> None:
        """Let go of everything but the persistent."""
        for parameter in self._sharded:
            if self._whole.pop(id(parameter), None) is not None:
                self._engine.let_go(_key(parameter))

    def owns(self, parameter: Any) -> bool:
        """Whether this model's parameter is one that is gathered and let go."""
        return any(p is parameter for p in self._sharded)

    @contextmanager
    def gathered(self, parameters: list[Any] | None = None) -> Iterator[None]:
        """These (all, for TRL's generation) whole at once, whatever modules do meanwhile where it is all."""
        wanted = self._sharded if parameters is None else parameters
        before = set(self._whole)
        self._gather(wanted, together=False)
        fixed, self._fixed = self._fixed, self._fixed or parameters is None
        try:
            yield
        finally:
            self._fixed = fixed
            for parameter in wanted:
                if id(parameter) not in before and self._whole.pop(id(parameter), None) is not None:
                    self._engine.let_go(_key(parameter))


def _key(parameter: Any) -> str:
    return f"whole.{id(parameter)}"


def _training() -> bool:
    """Whether this is a pass with gradients, forward or backward: only those are traced."""
    return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1


class Zero3Engine(ZeroEngine):
    """What ZeRO-3 holds on one rank: one part of everything, and whole parameters while they are used.

    The reduce bucket and this rank's gradients are allocated once and stay. Build the model with recording paused.
    """

    def __init__(self, model: Any, settings: Settings, session: Any) -> None:
        self._settings = settings
        self._models: list[Coordinator] = []
        super().__init__(model, settings, session)
        self._take_bucket()
        self.hold("accumulated", self.part * HALF, Category.GRADIENTS, "this rank's gradients", "sharded")

    @property
    def part(self) -> int:
        """Elements of this rank's share: each parameter is divided on its own."""
        return sum(self._share(p) for p in self.params)

    def _share(self, parameter: Any) -> int:
        return int(-(-parameter.numel() // self.world))

    def _take_weights(self, model: Any) -> None:
        self.add_model(model, Category.WEIGHTS)

    def add_model(self, model: Any, category: Category) -> None:
        """Shard another model too: a reference, a reward model."""
        size = sum(self._share(p) for p in model.parameters()) * HALF
        self.hold(f"shards.{id(model)}", size, category, "shards", "sharded")
        for parameter in model.parameters():
            self.recorder.disown(parameter)
        self._models.append(Coordinator(model, self, category, self._settings))

    def _make_partitions(self) -> list[Partition]:
        groups: list[int] = []
        elements = _SUB_GROUP
        for parameter in self.params:
            if elements >= _SUB_GROUP:
                groups.append(0)
                elements = 0
            groups[-1] += self._share(parameter)
            elements += parameter.numel()
        return [Partition(numel, self.session) for numel in groups]

    def gathered(self) -> AbstractContextManager[None]:
        """A context with all of the policy whole."""
        return self._models[0].gathered()

    def gathered_head(self, *parameters: Any) -> AbstractContextManager[None]:
        """A context with these parameters of one model whole."""
        for model in self._models:
            mine = [p for p in parameters if p is not None and model.owns(p)]
            if mine:
                return model.gathered(mine)
        return nullcontext()

    def backward(self, run: Any) -> Any:
        """``run()``; then what is left is reduced, and everything let go."""
        result = run()
        self._reduce()
        for model in self._models:
            model.pass_over()
        return result

    def _reduce(self) -> None:
        # The bucket's gradients are put in the order of ranks in a copy of it.
        self.recorder.scratch([self._in_bucket * HALF])
        self._in_bucket = 0

    def before_step(self) -> None:
        """Gradients are reduced already."""

    def _drop_flattened(self) -> None:
        self.let_go("flattened")
