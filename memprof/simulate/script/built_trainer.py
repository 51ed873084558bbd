"""Build a script's own trainer on fake tensors, and simulate its training where the script calls ``train()``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from memprof.compat import patching, require
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.compat.patching import replacing
from memprof.config.from_trainer import as_built, from_arguments, prompt_tokens, trainer_kind
from memprof.config.settings import Settings
from memprof.errors import InputError, UsageError
from memprof.foreign import Kwargs
from memprof.recording.run_facts import collect_setup, plain_config
from memprof.simulate.fake_cuda.fakes import as_fakes
from memprof.simulate.fake_cuda.nf4 import tell_of_adapters
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.run import model_facts
from memprof.simulate.script.world import with_subclasses
from memprof.simulate.trainer.build import MEASURED, WARM_UP, dataset_of, set_optimizer
from memprof.simulate.trainer.lean import is_lean, lean_arguments, lean_world
from memprof.simulate.trainer.rewards import reward_named
from memprof.simulate.trainer.rollout import fake_rollout
from memprof.simulate.trainer.training import notes_on_length, watched
from memprof.vocabulary import Phase

# Changes that the simulated device takes, whatever the trainer.
_OF_EVERY_TRAINER = ("attn", "padding", "alloc_conf")


class TrainingSimulated(BaseException):
    """The script's ``train()`` was simulated; no ``except Exception`` of the script's may go on from here."""


class ScriptTrainer:
    """Stand between a script and the trainer it builds.

    ``changes`` replace the script's own settings; ``notes`` receive what was changed or left out.
    ``name`` is the trainer's class, ``settings`` what it was found to be; None where it trains with neither GRPO nor
    RLOO.
    """

    def __init__(self, changes: Mapping[str, Any], device: str, notes: list[str]) -> None:
        self._changes, self._device, self._notes = changes, device, notes
        self.settings: Settings | None = None
        self.name = "trainer"
        self._inside = 0
        self._data: Any = None
        self._policy: Any = None
        self._lean = False

    @contextlib.contextmanager
    def intercepted(self, session: FakeSession, folder: str, modes: list[Any]) -> Iterator[None]:
        """Let every transformers trainer be built and trained as simulated, while open, and write to ``folder``.

        ``modes``: the fake world's dispatch modes, which the script's own lines run without.
        """
        self._session, self._folder, self._modes = session, folder, modes
        kind, init = transformers_names.TRAINER_INIT.place()
        building = [(sub, init, self._building(vars(sub)[init])) for sub in with_subclasses(kind) if init in vars(sub)]
        with (
            replacing(*building),
            patching(
                (transformers_names.TRAIN, self._training(transformers_names.TRAIN.get())),
                (transformers_names.SAVE, _nothing),
                (transformers_names.PUSH, _nothing),
                *((named, self._reference) for named in (trl_names.CREATE_MODEL, trl_names.CREATE_RLOO_REFERENCE)),
            ),
            contextlib.ExitStack() as self._worlds,
        ):
            yield

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        """Enter the fake world again, from within the script's own lines."""
        with contextlib.ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1

    def _building(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = _named_arguments(original)

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self._inside:
                original(trainer, *args, **kwargs)
                return
            call = signature.bind_partial(trainer, *args, **kwargs)
            self.name = type(trainer).__name__
            load = self._session.enter_phase(Phase.LOAD.value)
            with self._fake():
                self._prepare(trainer, call.arguments, signature)
                original(*call.args, **call.kwargs)
                self._after(trainer)
            if load is not None:
                self._session.exit_phase(load)

        return init

    def _prepare(self, trainer: Any, given: Kwargs, signature: inspect.Signature) -> None:
        """Change what the trainer is built of: its model has fake weights, its arguments suit this machine."""
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig

        kind, lean = trainer_kind(trainer), is_lean(trainer)
        grpo = kind == "rloo" or isinstance(trainer, GRPOTrainer)
        model = given.get("model")
        if isinstance(model, nn.Module):
            as_fakes(model)
            self._policy = model
            self._session.add_model(model, "policy")
        if given.get("args") is None and grpo:
            given["args"] = (RLOOConfig if kind == "rloo" else GRPOConfig)(self._folder)
        if lean:
            given["args"] = self._leanly(given["args"], kind)
        assumed: list[str] = []
        if not grpo:
            self._refuse_changes(type(trainer).__name__)
        if grpo:
            changes = {**self._changes, "device": self._device}
            name = str(transformers_names.MODEL_NAME.of(getattr(model, "config", None), ""))
            self.settings = from_arguments(
                given["args"], model, given.get("peft_config"), changes, assumed, lean=lean, name=name, kind=kind
            )
            if self.settings.optim != "none":
                given["args"].optim = self.settings.optim
        if given.get("args") is not None:
            _tame(given["args"], self._folder, grpo=grpo)
        if given.get("callbacks"):
            self._notes.append(f"{len(given['callbacks'])} callback(s) of the script were left out")
        for name in ("callbacks", "eval_dataset"):
            if name in signature.parameters:
                given[name] = None
        self._data = given.get("train_dataset")
        if grpo:
            rewards = given.get("reward_funcs")
            given["reward_funcs"] = self._rewards(rewards if isinstance(rewards, list) else [rewards])
            assert self.settings is not None
            self._notes += assumed
            given["train_dataset"] = dataset_of(self.settings)

    def _refuse_changes(self, name: str) -> None:
        """Refuse settings that are put into the arguments of GRPO and RLOO only."""
        unused = [f"--{change.replace('_', '-')}" for change in self._changes if change not in _OF_EVERY_TRAINER]
        if unused:
            raise UsageError(
                f"{', '.join(unused)} changes nothing here: the script trains with {name}, whose arguments are its own."
            )

    def _leanly(self, given: Any, kind: str) -> Any:
        """Make the lean trainer's arguments; from here on it sees the simulated device."""
        if not self._lean:
            require("simulate.lean")
            self._lean = True
            self._worlds.enter_context(lean_world(self._reference, self._session, self._device))
        return lean_arguments(given, self._folder, self._notes, kind)

    def _rewards(self, rewards: list[Any]) -> list[Any]:
        """Keep reward models, which run; replace functions, since there is no text for them to look at."""
        functions = [r for r in rewards if not isinstance(r, (str, nn.Module))]
        for reward in rewards:
            if isinstance(reward, nn.Module):
                as_fakes(reward)
                self._session.add_model(reward, "reward")
        if functions:
            self._notes.append(f"{len(functions)} reward function(s) were not called: there is no text to judge")
        return [reward_named(r) if r in functions else r for r in rewards]

    def _reference(self, model_id: str, architecture: Any = None, **kwargs: Any) -> Any:
        """Make the policy or the reference, by name, where TRL calls ``create_model_from_path``."""
        from transformers import AutoModelForCausalLM

        config = getattr(self._policy, "config", None)
        if config is not None and model_id in ("", None, transformers_names.MODEL_NAME.of(config)):
            kwargs["config"] = config
        kwargs.setdefault("dtype", "float32")  # as TRL does
        kwargs.pop("device_map", None)
        with torch_names.NO_MODES.get()():
            model = (architecture or AutoModelForCausalLM).from_pretrained(model_id, **kwargs)
        as_fakes(model)
        self._policy = self._policy if self._policy is not None else model
        return model

    def _after(self, trainer: Any) -> None:
        """Tell the session of the trainer's models, settle its settings, and let it generate without values."""
        session = self._session
        self._add_models(trainer)
        tell_of_adapters(trainer.model)
        if session.fake_recorder.cuda and getattr(trainer, "reward_weights", None) is not None:
            session.fake_recorder.storages.disown(trainer.reward_weights)  # TRL keeps them on the host
        session.setup = {"model_config": plain_config(getattr(trainer.model, "config", None))}
        with contextlib.suppress(InputError):  # a model of another kind
            session.config.update(model_facts(trainer.model.config))
        if self.settings is not None:
            if "prompt_length" not in self._changes:
                self._measure_prompts(trainer)
            self.settings = as_built(self.settings, collect_setup(trainer))
            self._notes += notes_on_length(trainer.model, self.settings.sequence_length)
            session.config.update(self.settings.to_dict())
            fake_rollout(trainer, self.settings, session)
            set_optimizer(trainer, self.settings, session)

    def _add_models(self, trainer: Any) -> None:
        session = self._session
        for reward in getattr(trainer, "reward_funcs", ()):
            if isinstance(reward, nn.Module):
                as_fakes(reward)
                session.add_model(reward, "reward")
        session.book.forget_models()
        session.add_model(trainer.model, "policy")
        if getattr(trainer, "ref_model", None) is not None and not session.host_bytes:  # else it is not on the device
            session.add_model(trainer.ref_model, "reference")
        session.owners.claim_models()

    def _measure_prompts(self, trainer: Any) -> None:
        with torch_names.NO_MODES.get()():
            longest = prompt_tokens(self._data, trainer.processing_class)
        assert self.settings is not None
        if not longest:
            words = f"how long its prompts are is not known; {self.settings.prompt_length} tokens were taken"
            self._notes.append(f"{words} (--prompt-length)")
            return
        self.settings = self.settings.with_(prompt_length=longest)
        self._notes.append(f"its longest prompt has {longest} tokens, and all were taken to be as long")

    def _training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        script = self

        def train(self: Any, *_: Any, **__: Any) -> Any:
            with script._fake(), watched(self, script._session):
                original(self)
                script._session.look_again()
            raise TrainingSimulated

        return train


def _named_arguments(init: Callable[..., None]) -> inspect.Signature:
    """Return a trainer's arguments by name; the lean trainer passes on what TRL's is given."""
    from memprof.grpo import LeanGRPOTrainer, LeanRLOOTrainer

    passed_on = {LeanGRPOTrainer.__init__: trl_names.TRAINER_INIT, LeanRLOOTrainer.__init__: trl_names.RLOO_INIT}
    return inspect.signature(passed_on[init].get() if init in passed_on else init)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in the place of a function that writes."""


def _tame(arguments: Any, folder: str, *, grpo: bool) -> None:
    """Set two steps (or generation cycles), no logging, saving or evaluation, and ``folder`` for what is written."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    cycle = 1
    if grpo:
        steps = arguments.steps_per_generation // arguments.gradient_accumulation_steps
        cycle = max(1, steps) * arguments.num_iterations
        arguments.use_vllm = arguments.log_completions = False
        if hasattr(arguments, "park_weights"):
            arguments.park_weights = False  # with the engine, modelled
    arguments.output_dir = arguments.logging_dir = folder
    arguments.max_steps = (WARM_UP + MEASURED) * cycle
    arguments.logging_strategy = arguments.eval_strategy = IntervalStrategy.NO
    arguments.save_strategy = SaveStrategy.NO
    for name in ("load_best_model_at_end", "push_to_hub", "do_eval", "save_only_model", "logging_first_step"):
        setattr(arguments, name, False)
    arguments.report_to = []
    arguments.disable_tqdm = True
    arguments.dataloader_pin_memory = False
    arguments.dataloader_num_workers = 0
