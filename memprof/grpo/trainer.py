"""``LeanGRPOTrainer``: TRL's ``GRPOTrainer`` with the same loss and gradients in a fraction of the memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer

from memprof.compat import accelerate, missing, peft, require, transformers, trl
from memprof.compat.patching import replacing
from memprof.errors import UsageError
from memprof.grpo import device as machine
from memprof.grpo import support
from memprof.grpo.budget import keep_within_budget
from memprof.grpo.config import LeanGRPOConfig
from memprof.grpo.cpu_offload import WeightOffload
from memprof.grpo.generation import Generation
from memprof.grpo.loss.head import Head, add_lean_head
from memprof.grpo.loss.load_balancing import LoadBalancing
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.once_log import OnceLog
from memprof.grpo.reference import HostReference, load_reference, reference_place
from memprof.grpo.rows import Row, is_fake, rows_of
from memprof.grpo.step.context import StepContext, base_model_of
from memprof.grpo.step.micro_batch import PiecewiseStep
from memprof.grpo.step.objective import LogprobInjection, Objective
from memprof.grpo.step.optimizer_step import RetryingStep
from memprof.grpo.step.out_of_memory import Adaptation, say_where
from memprof.grpo.step.own_loss import StepLoss
from memprof.grpo.step.pieces import PieceSizes, fits_one_piece
from memprof.grpo.step.probe import ModelTraits, ask
from memprof.grpo.step.ranks import RankGroup
from memprof.grpo.step.schemes import LossTerms, scheme_of
from memprof.grpo.step.scoring import score_without_graph
from memprof.grpo.techniques.apply import Techniques
from memprof.grpo.techniques.rounding import rounded_optimizer
from memprof.grpo.weights import choose_weights

# What the methods call is that of the trainer it is mixed into; mypy is told of one.
_Trainer: Any = GRPOTrainer if TYPE_CHECKING else object

# Without it no trainer can be constructed, but the class can be imported and say why.
_profiled: Callable[[Any], Any] = trl.PROFILED.find() or (lambda method: method)


class LeanTrainer(_Trainer):
    """Make one of TRL's trainers lean, as its first base: same arguments, data, rewards, logs and checkpoints.

    ``args`` may be the lean config, which adds switches, or TRL's plain one. Generation, rewards, advantages and the
    formula of the loss are TRL's own code. What differs is how a micro-batch goes through the model: in pieces without
    padding, each with its forward and backward, the loss's normalisers being those of the whole.

    Raises:
        UsageError: a combination that cannot work, named; or an installed package has no longer what this needs.
    """

    _trained_as: Any
    _config: Any
    _feature = "lean"

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        support.refuse_other_trainers(type(self), self._trained_as)
        require(self._feature)
        name = model if isinstance(model, str) else transformers.MODEL_NAME.of(model.config, "") or "model"
        method = self._trained_as.__name__.removesuffix("Trainer")
        lean = self._config.of(args, f"{name.rstrip('/').split('/')[-1]}-{method}")
        given = inspect.signature(self._trained_as.__init__).bind(self, model, reward_funcs, lean, *rest, **options)
        chosen = {key: value for key, value in given.arguments.items() if key != "self"}
        self._handover = LogprobInjection()
        self._once_log = OnceLog()
        self._generation = Generation()
        self._coupling: list[Any] = []  # losses that were seen to couple sequences
        self._whole_batch_reason: str | None = None
        self._step_loss: StepLoss | None = None  # of the training step that runs
        self._has_stepped = False
        self._host_reference: HostReference | None = None
        self._retrying: Any = None  # the optimizer whose step lives through memory that runs out
        support.check_supported(lean, known_loss=self._loss_is_trls)
        support.check_offload_of(lean, model, chosen.get("quantization_config"))
        support.disable_unsupported_sleep(lean, self._once_log)
        with _put_back(lean, "beta", "model_init_kwargs"):
            choose_weights(lean, chosen, self._once_log)
            adapter = chosen.get("peft_config") is not None or peft.CONFIGS.of(model) is not None
            place, why_device = reference_place(lean, adapter)
            if place == "host":
                lean.beta = 0.0  # TRL makes no copy of the model then
            super().__init__(**chosen)
        self._prepare_model(lean)
        self._place_reference(place, why_device, chosen.get("quantization_config"))
        if lean.memory_budget is not None:
            self._keep_within_budget()
        self._techniques.apply()

    def _prepare_model(self, lean: LeanGRPOConfig) -> None:
        for note in missing("lean"):
            self._once_log.warn(note)
        if lean.use_vllm and lean.vllm_mode == "colocate" and lean.vllm_enable_sleep_mode:
            self._once_log.warn("unlike TRL by default, vLLM sleeps while training (vllm_enable_sleep_mode=False)")
        base = base_model_of(self.accelerator, self.model)
        support.check_offload_of(lean, base)
        self._check_half(lean, base)
        add_lean_head(base)
        temperature = trl.TEMPERATURE.of(self)
        self._sizes = PieceSizes(base)
        self._lean_head = Head.of(
            base, temperature, lean.cast_lm_head_to_fp32, lean.loss_chunk_tokens, self._sizes.small_bytes
        )
        self._probe: ModelTraits | None = None  # before the first step
        self._probed_with: frozenset[Any] = frozenset()  # the forward hooks that were there
        self._clear_cache = accelerate.CLEAR_CACHE.get()
        self._offload = WeightOffload(self.accelerator.device, self._clear_cache)
        self._techniques = Techniques(lean, base, self.accelerator.device, self._once_log)
        self._adaptation = self._adapting(lean)
        self._balancing = LoadBalancing.of(base) if trl.AUX_LOSS.of(self) else None
        self._whole_batch_reason = support.whole_batch_reason(self, self._balancing)
        if self._whole_batch_reason:
            self._once_log.warn(f"TRL's own step is used: {self._whole_batch_reason}.")

    def _adapting(self, lean: LeanGRPOConfig) -> Adaptation | None:
        """Return what lives through memory that runs out, or None where that is not wanted or cannot be: a simulation
        answers whether the run as it is set has room."""
        real = machine.computes_values() and not is_fake(next(self.model.parameters()))
        if lean.on_oom == "raise" or (lean.on_oom == "auto" and not (real and self.accelerator.device.type == "cuda")):
            return None
        why = None
        if RankGroup.of(self.accelerator, self.model).forward_together:
            why = "works without FSDP and DeepSpeed: ranks would wait for the one that goes on smaller"
        elif (lean.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            why = "needs checkpointing with use_reentrant=False, torch's default"
        if why is None:
            reduce = self._techniques.reduce_memory
            return Adaptation(self._once_log, self._clear_cache, lambda tokens: reduce(tokens, draws=self._draws))
        if lean.on_oom == "adapt":
            raise UsageError(f"on_oom='adapt' {why}.")
        self._once_log.say(f"memory that runs out ends the run: on_oom='adapt' {why}")
        return None

    def _check_half(self, lean: LeanGRPOConfig, base: Any) -> None:
        """Refuse a dtype in which the loss cannot be computed on this card."""
        device, mixed = self.accelerator.device, self.accelerator.mixed_precision
        if device.type != "cuda" or torch.version.hip is not None:
            return
        half = mixed if mixed != "no" else str(base.dtype).removeprefix("torch.")
        support.check_bfloat16_of(torch.cuda.get_device_capability(device), half, lean)

    def _place_reference(self, place: str, why_device: str, quantization_config: Any) -> None:
        if place == "host":
            self.beta = self.args.beta
            self.ref_model = load_reference(self.model, self.args, quantization_config)
            self._host_reference = HostReference(self.ref_model, self.accelerator.device)
            self._once_log.say("the reference stays in host memory and passes over the device layer by layer")
        elif place == "device":
            if self.ref_model is not None:
                add_lean_head(self.accelerator.unwrap_model(self.ref_model))
            self._once_log.say(f"the reference stays on the device: {why_device or 'as asked'}")

    def _keep_within_budget(self) -> None:
        require("budget")
        if self._whole_batch_reason:
            raise UsageError(f"memory_budget chooses among chunk settings, but {self._whole_batch_reason}.")
        keep_within_budget(self, self._techniques, self._once_log)

    @property
    def applied_checkpointing(self) -> str:
        """The kind of checkpointing in use; ``auto`` leaves it to TRL's own arguments."""
        return self._techniques.checkpointing

    @property
    def lean_generation(self) -> Generation:
        """Return how completions are generated: together, in a rolling batch or in passes."""
        return self._generation

    def _step_context(self, divisor: int = 1) -> StepContext:
        """Describe the trainer as it is now to the functions of a step. ``divisor``: what its loss is divided by."""
        return StepContext(
            settings=self.args,
            accelerator=self.accelerator,
            policy=self.model,
            head=self._lean_head,
            loss=self._loss_terms(
                is_trls=self._loss_is_trls,
                is_wrapped=support.is_overridden(self, LeanTrainer, "compute_loss"),
                divisor=divisor,
                couples=any(loss is getattr(type(self), trl.LOSS.name) for loss in self._coupling),
                balances=self._balancing is not None,
            ),
            ranks=RankGroup.of(self.accelerator, self.model),
            log=self._once_log,
            pad_id=trl.TOKENIZER.of(self).pad_token_id,
            counts_padding=self._probe is None or self._probe.counts_padding,
            draws=self._draws,
            adaptation=self._adaptation,
            adapter_outside=self._adapter_outside,
            group_size=trl.GROUP_SIZE.of(self),
            completion_length=trl.COMPLETION_LENGTH.of(self),
            tile=self._techniques.tile,
            piece_tokens=self._piece_tokens(),
            balancing=self._balancing,
        )

    def _piece_tokens(self) -> tuple[int, int]:
        """Return the tokens of a piece with a graph and without, no more than memory has had room for."""
        sizes = self._sizes.of(self.args, self._techniques.checkpointing)
        if self._adaptation is None:
            return sizes
        self._adaptation.recall(self.state.stateful_callbacks.setdefault(_KEPT, {}))
        return self._adaptation.limit(sizes[0]), self._adaptation.limit(sizes[1])

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as TRL does, with transformers' own checkpointing off while the layers are checkpointed here."""
        names = [name for name in _CHECKPOINTING if hasattr(self.args, name)]
        off = names if self.applied_checkpointing != "auto" else []
        try:
            with replacing(*((self.args, name, False) for name in off)):
                return super().train(*args, **options)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if self._adaptation is not None:
                say_where(error)
            raise

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Run TRL's training step. Only the loss that it computes itself goes in pieces."""
        self._step_loss = step_loss = StepLoss()
        try:
            found = super().training_step(*args, **options)
        finally:
            self._step_loss = None
        step_loss.check_backward()
        return found

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return TRL's context, in which the training step computes its loss."""
        context: AbstractContextManager[Any] = super().compute_loss_context_manager()
        return context if self._step_loss is None else self._step_loss.computing(context)

    @_profiled
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Compute the loss of a micro-batch.

        In a training step, the pieces have their backward here, and the result has the value of the whole loss. It has
        the graph of the last piece only if ranks meet in that backward or a subclass may scale the loss. Anywhere else,
        with gradients on, this is TRL's ``compute_loss``: one graph of the whole micro-batch, and nothing is added to
        ``.grad``.
        """
        step_loss, has_graph = self._step_loss, torch.is_grad_enabled()
        is_whole = return_outputs or (has_graph and not self._is_steps_loss())
        rows = None if is_whole else self._rows(inputs, inputs)
        if rows is None:
            whole: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return whole
        if step_loss is None or not has_graph:
            plain: torch.Tensor = trl.LOSS.of(self)(model, inputs)  # its log-probabilities come in pieces
            return plain
        step = self._step_context(self._divisor(num_items_in_batch))
        one_piece = step.loss.balances and fits_one_piece(step, rows)
        scheme = scheme_of(step.loss, step.settings, inputs, scales=step.scales_gradients, one_piece=one_piece)
        self._once_log.say(f"chunks by the scheme {scheme.name!r}: {scheme.why}")
        objective = Objective(self, self._handover, model, inputs, is_trls=step.loss.is_trls)
        pieces = PiecewiseStep(step, objective, model, inputs, rows, scheme)
        loss = pieces.run()
        if pieces.couples:
            self._coupling.append(getattr(type(self), trl.LOSS.name))
        return step_loss.follow(loss)

    @_profiled
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> Any:
        if (handed := self._handover.take(model, input_ids, attention_mask)) is not None:
            return handed
        cut = input_ids.shape[1] - logits_to_keep
        inputs: MicroBatch = {
            "prompt_ids": input_ids[:, :cut],
            "prompt_mask": attention_mask[:, :cut],
            "completion_ids": input_ids[:, cut:],
            "completion_mask": attention_mask[:, cut:],
        }
        unknown = compute_aux_loss and self._balancing is None
        rows = None if torch.is_grad_enabled() or unknown else self._rows(inputs, more)
        host = self._host_reference if self._host_reference and model is self._host_reference.module else None
        if rows is None and host is not None:
            with host.whole() as module:
                return super()._get_per_token_logps_and_entropies(
                    module, input_ids, attention_mask, logits_to_keep, batch_size, **more
                )
        if rows is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **more
            )
        if host is not None:
            return host.logps(self._step_context(), inputs, rows), None, None
        step = self._step_context()
        logps, entropies, routed = score_without_graph(
            step, model, inputs, rows, compute_entropy, balances=compute_aux_loss
        )
        shared = step.balancing and routed and step.balancing.share(routed, routed)
        return logps, entropies if compute_entropy else None, shared

    def _generate_single_turn(
        self, prompt_ids: list[Any], images: Any, multimodal_fields: Any, *more: Any, **options: Any
    ) -> Any:
        """Generate as TRL does, but in as many parts as memory needs; draws then come in another order."""
        generate = super()._generate_single_turn
        if trl.USE_VLLM.of(self) or trl.CONTINUOUS_BATCHING.of(self) or images or multimodal_fields:
            parked = self._offload.parked(self.model, self.optimizer) if self.args.park_weights else nullcontext()
            with parked:
                found = generate(prompt_ids, images, multimodal_fields, *more, **options)
        else:
            tokens = [token for ids in prompt_ids[:100] for token in ids]
            self._goes_in_pieces(torch.tensor(tokens, device=self.accelerator.device))
            found = self._generation.run(
                self._step_context(),
                prompt_ids,
                lambda some: generate(some, images, multimodal_fields, *more, **options),
                self.state.stateful_callbacks,
            )
        if self.accelerator.device.type != "cpu":
            self._clear_cache()  # what the cache was in is of no use to training, whose blocks have other sizes
        return found

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        """Return TRL's choice, with stochastic rounding where bf16 weights are trained."""
        kind, keywords = self._trained_as.get_optimizer_cls_and_kwargs(args, model)
        if self.args.stochastic_rounding == "never":
            return kind, keywords
        sharded = transformers.FSDP_IS_ON.of(self) or transformers.DEEPSPEED_IS_ON.of(self)
        return rounded_optimizer(self.model, kind, keywords, self._once_log, sharded=sharded, seed=args.seed)

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Return TRL's optimizer; where a run adapts, its step is repeated when memory runs out."""
        made = super().create_optimizer(*args, **options)
        if self._adaptation is not None and self._retrying is not made:
            self._retrying, self._adaptation.park = made, RetryingStep.put_in(made, self._adaptation).park
        return made

    def _rows(self, inputs: MicroBatch, more: Mapping[str, object]) -> list[Row] | None:
        """Return the rows to cut into pieces, or None where TRL's own path is the one for these inputs.

        ``more``: what a batch with images has besides.
        """
        if self._whole_batch_reason or self._is_whole_now():
            return None
        if any(more.get(name) is not None for name in _IMAGE_INPUTS):
            self._once_log.warn("TRL's own step is used for batches with images.")
            return None
        rows = rows_of(inputs)
        if not self._goes_in_pieces(inputs["prompt_ids"]):
            return None
        if rows is None:
            self._once_log.warn("TRL's own step is used for batches whose attention masks have holes.")
        return rows

    def _is_steps_loss(self) -> bool:
        """Return whether the loss that is asked for with gradients on is the training step's own; log it if not."""
        if self._step_loss is not None and self._step_loss.take():
            self._has_stepped = True
            return True
        if not self._has_stepped and support.has_own_backward(self.training_step):
            self._use_trls_step("an overridden training_step has a backward of its own")
        else:
            self._once_log.say("compute_loss outside a training step computes TRL's loss, in one graph")
        return False

    def _is_whole_now(self) -> bool:
        """Return whether hooks need one backward of the whole batch, or TRL's ``compute_loss`` has been replaced."""
        if not (torch.is_grad_enabled() and self.model.training):
            return False
        why = support.PATCHED if support.steps_elsewhere(type(self)) else support.hooked(self.model)
        if why is not None:
            self._use_trls_step(why)
        return why is not None

    def _use_trls_step(self, why: str) -> None:
        if self.args.memory_budget is not None:
            raise UsageError(f"memory_budget chooses among chunk settings, but {why}.")
        self._once_log.warn(f"TRL's own step is used: {why}.")

    def _goes_in_pieces(self, tokens: torch.Tensor) -> bool:
        """Find out whether rows have the same results in pieces; where they have not, TRL's step is used.

        Asked once, and again where forward hooks have come or gone. ``tokens``: ids of any shape; a few make the rows.
        """
        if self._whole_batch_reason or is_fake(tokens) or not machine.computes_values():
            return not self._whole_batch_reason
        hooks = support.forward_hooks(self.model)
        if self._probe is None or hooks != self._probed_with:
            self._probed_with = hooks
            step = self._step_context()
            self._probe = ask(step, tokens.flatten()[:1000])
            why = self._probe.why
            if step.ranks.forward_together and step.ranks.any(why is not None):
                why = why or "another rank's rows depend on their padding"
            if why is not None:
                where = ", ".join(sorted({name or "the model" for name, _ in hooks}))
                self._whole_batch_reason = f"{why} (with a forward hook on {where})" if hooks else why
                self._use_trls_step(self._whole_batch_reason)
        return not self._whole_batch_reason

    @property
    def _draws(self) -> bool:
        """Tell whether a forward in training draws random numbers."""
        return self._probe is None or self._probe.draws

    @property
    def _adapter_outside(self) -> str | None:
        """Return why the model must not be called without PEFT's wrapper; None where it may."""
        inside = self._probe is None or self._probe.adapter_inside
        return support.adapter_outside(self.model) or (None if inside else "the adapter is not inside the model")

    @property
    def _loss_is_trls(self) -> bool:
        """Tell whether the loss is TRL's function of TRL's log-probabilities, which no subclass has replaced."""
        own, logps = type(self), LeanTrainer._get_per_token_logps_and_entropies
        return (
            getattr(own, trl.LOSS.name) is getattr(self._trained_as, trl.LOSS.name)
            and trl.LOSS.name not in vars(self)
            and own._get_per_token_logps_and_entropies is logps
        )

    def _divisor(self, num_items_in_batch: Any) -> int:
        """Return what transformers' ``training_step`` divides the loss by: the accumulated micro-batches, or 1 if the
        loss counts them itself."""
        scaled = transformers.LOSS_IS_SCALED.of(self)
        if scaled is None:
            scaled = self.compute_loss_func or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)
        return 1 if scaled else int(self.current_gradient_accumulation_steps)

    def _loss_terms(self, **known: Any) -> LossTerms:
        raise NotImplementedError


class LeanGRPOTrainer(LeanTrainer, GRPOTrainer):
    """Drop-in for ``trl.GRPOTrainer``; ``args``: a ``LeanGRPOConfig`` or a plain ``GRPOConfig``."""

    _trained_as, _config = GRPOTrainer, LeanGRPOConfig

    # Each has its own: `memprof simulate --script` takes the place of a trainer's own constructor.
    if TYPE_CHECKING:
        __init__ = GRPOTrainer.__init__
    else:

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)

        __init__.__wrapped__ = GRPOTrainer.__init__  # whose signature it has

    def _loss_terms(self, **known: Any) -> LossTerms:
        return LossTerms.of(self, **known)


#: The entry of the trainer's state, and so of its checkpoints, that holds what memory has had room for.
_KEPT = "LeanPieces"
#: transformers reads them where training begins; it renamed the second.
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
_IMAGE_INPUTS = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "num_images",
)  # fmt: skip


@contextmanager
def _put_back(args: Any, *names: str) -> Iterator[None]:
    """Restore these attributes of the caller's ``args`` after TRL has built its trainer."""
    before = {name: getattr(args, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
