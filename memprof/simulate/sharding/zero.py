"""Model DeepSpeed's ZeRO on one of many ranks: what its engine holds, when it takes it and when it gives it back.

DeepSpeed needs a GPU to start, so none of it runs. Its rules are read from the sources of release 0.19
(``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``partitioned_param_coordinator.py``) and put in as hooks
around the model and the optimizer that *are* executed: forward, backward and the optimizer's step over this rank's
partition. Parameters and gradients are bfloat16, as they are with ``bf16`` enabled; master weights and moments float32.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memprof.compat import accelerate as accelerate_names
from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.config.settings import Settings, ShardingSettings
from memprof.foreign import Kwargs
from memprof.simulate.recorder.session import FakeSession
from memprof.vocabulary import Category

_ALIGNMENT = 2  # elements a rank's share starts at a multiple of (``nccl_start_alignment_factor``)
HALF = 2  # bytes of an element
_SUB_GROUP = 10**9  # elements stage 3 steps at once (``sub_group_size``)
_graph_task: Any = torch_names.GRAPH_TASK.get()


def trainable_of(model: Any) -> list[Any]:
    """List the parameters that have gradients, tied ones once."""
    return [p for p in model.parameters() if p.requires_grad]


class ZeroEngine:
    """Hold what ZeRO-1 and ZeRO-2 hold on one rank.

    * weights: every trainable parameter in one flat bfloat16 buffer, whole on every rank;
    * optimizer state: master weights and moments of one part in ``world``;
    * communication: a bucket of ``reduce_bucket_size`` elements while there are gradients to reduce;
    * gradients: all of them until the step (stage 1); dropped as they are reduced, and one part kept (stage 2).

    New weights are gathered in place. Call :meth:`backward` around each backward.
    """

    def __init__(self, model: Any, settings: ShardingSettings, session: FakeSession) -> None:
        self.session, self.recorder = session, session.fake_recorder
        self.stage = int(settings.sharding.removeprefix("zero"))
        self.world = settings.gpus
        self.bucket_size = settings.reduce_bucket_size
        self.params = trainable_of(model)
        self._held: dict[str, int] = {}
        self._in_bucket = 0
        self._take_weights(model)
        self.masters = [self._master(numel) for numel in self._partitions()]
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def part(self) -> int:
        """Count the elements of this rank's share."""
        step = _ALIGNMENT * self.world
        return int(-(-sum(p.numel() for p in self.params) // step) * step // self.world)

    def _take_weights(self, model: Any) -> None:
        self.hold("flat", self.part * self.world * HALF, Category.WEIGHTS, "flat weights")
        for parameter in self.params:  # they are views of the flat buffer from here on
            self.recorder.storages.disown(parameter)

    def _partitions(self) -> list[int]:
        """Count the elements of each piece of this rank's master weights that the optimizer steps at once."""
        return [self.part]

    def _master(self, numel: int) -> torch.nn.Parameter:
        """Make a flat piece of this rank's float32 master weights."""
        master = torch.nn.Parameter(torch.empty(numel))
        self.session.book.claim(master, Category.OPTIMIZER_STATE, None, "master weights")
        return master

    def gathered(self) -> AbstractContextManager[None]:
        """Keep all weights whole, while open; they always are."""
        return nullcontext()

    # -- memory ------------------------------------------------------------------------------------------------

    def hold(self, key: str, nbytes: int, category: Category, name: str, detail: str | None = None) -> None:
        """Allocate memory under ``key``, once."""
        if key not in self._held and nbytes:
            self._held[key] = self.recorder.blocks.hold(nbytes, category, name, detail)

    def let_go(self, *keys: str) -> None:
        """Free what these keys hold."""
        for key in keys:
            if (address := self._held.pop(key, None)) is not None:
                self.recorder.blocks.release(address)

    # -- gradients ---------------------------------------------------------------------------------------------

    def backward(self, run: Any) -> Any:
        """Run ``run()``, and do what the engine does once all gradients are there."""
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
        """Reduce all gradients in stage 1, and keep this rank's."""
        if self.stage == 1:
            self._reduce()
            self._held["accumulated"] = self._held.pop("part")
            for parameter in self.params:
                parameter.grad = None
            self.let_go("bucket")

    def master_gradient(self, master: torch.nn.Parameter) -> None:
        """Make this rank's gradients, flattened and then in float32."""
        self.hold("flattened", master.numel() * HALF, Category.GRADIENTS, "flattened gradients", "sharded")
        gradient = torch.empty_like(master)
        self.session.book.claim(gradient, Category.GRADIENTS, "sharded", "master gradients")
        self._drop_flattened()
        master.grad = gradient

    def _drop_flattened(self) -> None:
        self.let_go("flattened", "accumulated")


class ZeroOptimizer(torch.optim.Optimizer):
    """Step the engine's partitions one after the other, by an optimizer of this ``kind``."""

    def __init__(self, engine: ZeroEngine, kind: type, arguments: Kwargs) -> None:
        self._engine = engine
        self.inner = kind(engine.masters, **arguments)
        super().__init__(engine.masters, {"lr": arguments.get("lr", 0.0)})
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every partition."""
        self._engine.before_step()
        for master in self._engine.masters:
            self._engine.master_gradient(master)
            self.inner.step()
            master.grad = None
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; they are gone by now."""
        for parameter in self._engine.params:
            parameter.grad = None


# -- stage 3 ---------------------------------------------------------------------------------------------------------


class Coordinator:
    """Keep track of which parameters of one model are whole just now; ``category``: what these are then."""

    def __init__(self, model: Any, engine: Zero3Engine, category: Category, settings: ShardingSettings) -> None:
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
        """Return a view of an input, whose gradient is there when the module's backward is over."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad or not torch.is_grad_enabled():
            return value
        view = value.view_as(value)
        view.register_hook(lambda grad: self.release(mine))  # type: ignore[no-untyped-call]
        return view

    @property
    def live(self) -> int:
        """Count the elements that are whole now, without persistent ones."""
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
        self._let_go(parameter for parameter in mine if id(parameter) not in kept)

    def _let_go(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if self._whole.pop(id(parameter), None) is not None:
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
        """End a training pass: the next is expected to go the same way, and nothing stays whole."""
        self._known, self._order = self._order, []
        self._ahead = deque(self._known)
        self._let_go(self._sharded)

    def owns(self, parameter: Any) -> bool:
        """Tell whether this model's parameter is one that is gathered and let go."""
        return any(p is parameter for p in self._sharded)

    @contextmanager
    def gathered(self, parameters: list[Any] | None = None) -> Iterator[None]:
        """Gather these at once while open; all (for TRL's generation) stay whole whatever modules do meanwhile."""
        wanted = self._sharded if parameters is None else parameters
        before = set(self._whole)
        self._gather(wanted, together=False)
        fixed, self._fixed = self._fixed, self._fixed or parameters is None
        try:
            yield
        finally:
            self._fixed = fixed
            self._let_go(parameter for parameter in wanted if id(parameter) not in before)


def _key(parameter: Any) -> str:
    return f"whole.{id(parameter)}"


def _training() -> bool:
    """Tell whether this is a pass with gradients, forward or backward: only those are traced."""
    return torch.is_grad_enabled() or _graph_task() != -1


class Zero3Engine(ZeroEngine):
    """Hold what ZeRO-3 holds on one rank: one part of everything, and whole parameters while they are used.

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
        """Count the elements of this rank's share: each parameter is divided on its own."""
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
            self.recorder.storages.disown(parameter)
        self._models.append(Coordinator(model, self, category, self._settings))

    def _partitions(self) -> list[int]:
        groups: list[int] = []
        elements = _SUB_GROUP
        for parameter in self.params:
            if elements >= _SUB_GROUP:
                groups.append(0)
                elements = 0
            groups[-1] += self._share(parameter)
            elements += parameter.numel()
        return groups

    def gathered(self) -> AbstractContextManager[None]:
        """Gather all of the policy, while open."""
        return self._models[0].gathered()

    def gathered_head(self, *parameters: Any) -> AbstractContextManager[None]:
        """Gather these parameters of one model, while open."""
        for model in self._models:
            mine = [p for p in parameters if p is not None and model.owns(p)]
            if mine:
                return model.gathered(mine)
        return nullcontext()

    def backward(self, run: Any) -> Any:
        """Run ``run()``; then reduce what is left, and let everything go."""
        result = run()
        self._reduce()
        for model in self._models:
            model.pass_over()
        return result

    def _reduce(self) -> None:
        # The bucket's gradients are put in the order of ranks in a copy of it.
        self.recorder.blocks.scratch([self._in_bucket * HALF])
        self._in_bucket = 0

    def before_step(self) -> None:
        """Do nothing: gradients are reduced already."""

    def _drop_flattened(self) -> None:
        self.let_go("flattened")


def attach_zero(trainer: Any, settings: Settings, session: FakeSession) -> ZeroEngine:
    """Divide a trainer's model, as ``deepspeed.initialize`` does.

    For stage 3 the trainer was built with recording paused, since its parameters are divided while they are loaded;
    recording goes on here. Without it a reference and a reward model stay whole, as TRL asks of DeepSpeed.
    """
    recorder = session.fake_recorder
    for parameter in trainer.model.parameters():
        if parameter.dtype is not torch.bfloat16:
            parameter.data = parameter.data.to(torch.bfloat16)
    engine: ZeroEngine
    if settings.whole_nowhere:
        recorder.storages.paused -= 1
        engine = stage3 = Zero3Engine(trainer.model, settings, session)
        others = [(trainer.ref_model, Category.REFERENCE_MODEL)]
        others += [(m, Category.REWARD_MODEL) for m in trainer.reward_funcs if isinstance(m, torch.nn.Module)]
        for model, category in others:
            if model is not None:
                stage3.add_model(model, category)
        for model in (trainer.model, *(m for m, _ in others)):
            for buffer in model.buffers() if model is not None else ():
                recorder.storages.birth(buffer)
    else:
        engine = ZeroEngine(trainer.model, settings, session)
    _go_through(trainer, engine)
    session.notes.append(
        f"ZeRO-{engine.stage} is modelled, not executed: DeepSpeed's rules of release 0.19, with its default buckets."
    )
    return engine


def _go_through(trainer: Any, engine: ZeroEngine) -> None:
    """Send the trainer's backward and its optimizer through the engine."""
    backward = accelerate_names.BACKWARD.of(trainer.accelerator)

    def divided(_: Any, loss: Any, **kwargs: Any) -> Any:
        return engine.backward(lambda: backward(loss, **kwargs))

    def create_optimizer(self: Any, model: Any = None) -> Any:
        kind, arguments = transformers_names.OPTIMIZER_OF.of(self)(self.args, self.model)
        self.optimizer = ZeroOptimizer(engine, kind, arguments)
        return self.optimizer

    bind(trainer.accelerator, accelerate_names.BACKWARD, divided)
    bind(trainer, transformers_names.CREATE_OPTIMIZER, create_optimizer)


@contextlib.contextmanager
def gathering_for_zero(engine: ZeroEngine | None) -> Iterator[None]:
    """Gather the output head's weights for TRL's loss where stage 3 has divided them, while open."""
    if not isinstance(engine, Zero3Engine):
        yield
        return
    with patching((trl_names.GATHERED_HEAD, engine.gathered_head)):
        yield
