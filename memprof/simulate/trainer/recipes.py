"""Choose the trainer of a recipe, and how it computes the loss: with logits in full as older TRLs did, or Liger's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from memprof.compat import optional_packages as optional_names
from memprof.compat import transformers as transformers_names
from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.config.settings import Settings, TrainerSettings
from memprof.config.to_trl_config import lean_arguments
from memprof.errors import UsageError
from memprof.foreign import Kwargs
from memprof.units import format_gib


def classes_of(settings: TrainerSettings) -> tuple[Any, Any]:
    """Return the trainer's class and its config's. A recipe that is a trainer of its own is chosen here."""
    import trl

    from memprof import grpo

    name = settings.trainer.upper()
    if settings.lean:
        return getattr(grpo, f"Lean{name}Trainer"), getattr(grpo, f"Lean{name}Config")
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def config_of(settings: Settings) -> Kwargs:
    """Make the arguments of the recipe's config beside those of every recipe."""
    if not settings.lean:
        return {}
    # The engine is modelled, and so is that weights make room for it.
    return {**lean_arguments(settings), "weights": "as_given", "park_weights": False, **_as_sharded(settings)}


def _as_sharded(settings: Settings) -> Kwargs:
    """Make the choices that the lean trainer makes once accelerate or transformers shards a run, unseen on fakes.

    Its reference is then sharded on the devices, and under ZeRO-3 the step is TRL's own.
    """
    if not settings.divided:
        return {}
    chosen: Kwargs = {"micro_splitting": settings.sharding != "zero3"}
    if settings.beta != 0.0 and not settings.has_adapter:
        chosen["reference"] = "device"
    return chosen


def apply_recipe(trainer: Any, settings: TrainerSettings) -> None:
    """Make a trainer compute its loss as ``settings.recipe`` says.

    Raises:
        UsageError: the recipe's package is not installed.
    """
    # GRPO has the router's auxiliary loss from TRL 1.7 on.
    if settings.recipe in ("trl-full-logits", "trl-in-place-logits", "trl-0.14"):
        setattr(trainer, trl_names.AUX_LOSS.name, False)
    if settings.recipe == "trl-full-logits":
        bind(trainer, trl_names.LOGPS, logps_from_full_logits)
    elif settings.recipe == "trl-in-place-logits":
        bind(trainer, trl_names.LOGPS, _logps_in_place)
    elif settings.recipe == "trl-0.14":
        bind(trainer, trl_names.LOGPS, _logps_and_entropies)
    elif settings.recipe == "liger":
        if find_spec("liger_kernel") is None:
            raise UsageError("--recipe liger runs Liger's own loss: pip install liger-kernel.")
        bind(trainer, trl_names.LOSS, liger_loss)


def liger_note(settings: Settings, config: Any) -> str:
    """Say that Liger's layers are left out, and at least how much less a real run keeps for backward.

    Liger's SwiGLU keeps its two inputs, and the model's own keeps the activated gate too: in every layer, or in the one
    that is recomputed. What Liger's norms and rotary embeddings keep less is not counted.
    """
    words = "Liger's loss is simulated, its layers (use_liger_kernel: RMSNorm, SwiGLU, RoPE) are not"
    text = config.get_text_config(decoder=True)
    width = getattr(text, "intermediate_size", None)
    if not isinstance(width, int):
        return f"{words}: a real run with them saves less for backward."
    layers = 1 if settings.gradient_checkpointing else int(text.num_hidden_layers)
    itemsize = 2 if settings.mixed_precision != "no" or settings.weights_dtype != "float32" else 4
    less = layers * itemsize * width * settings.per_device_train_batch_size * settings.sequence_length
    return f"{words}: a real run with them saves less for backward, by {format_gib(less)} GiB or more."


def _logps_and_entropies(
    self: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **_: Any,
) -> tuple[Any, Any, Any]:
    """Compute log-probabilities in the way and order of TRL 0.14, in the place of the installed TRL's method."""
    if not torch.is_grad_enabled():  # the installed release asks for the reference here; 0.14 did so later
        return input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32), None, None
    logps = _logps(model, input_ids, logits_to_keep)
    if self.beta:
        with torch.no_grad():
            if self.ref_model is not None:
                _logps(self.ref_model, input_ids, logits_to_keep)
            else:
                with self.accelerator.unwrap_model(model).disable_adapter():
                    _logps(model, input_ids, logits_to_keep)
    return logps, torch.zeros_like(logps.detach()) if compute_entropy else None, None


def _logps(model: Any, input_ids: Any, keep: int) -> Any:
    logits = model(input_ids=input_ids, logits_to_keep=keep + 1).logits
    return log_softmax_rows(logits[:, :-1, :], input_ids[:, -keep:])


_ENTROPY_ROWS = 128


def logps_from_full_logits(
    self: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    in_place: bool = False,
    **_: Any,
) -> tuple[Any, Any, Any]:
    """Compute log-probabilities from ``[batch, tokens, vocabulary]`` logits, in the place of TRL's own method.

    ``in_place``: the temperature divides the logits themselves, as in TRL 1.0 to 1.9, and no copy of them.
    """
    batch_size = batch_size or input_ids.size(0)
    logps, entropies = [], []
    for start in range(0, input_ids.size(0), batch_size):
        ids = input_ids[start : start + batch_size]
        mask = attention_mask[start : start + batch_size]
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits
        logits = logits[:, :-1, :]
        logits = logits[:, -logits_to_keep:]
        logits = logits.div_(self.temperature) if in_place else logits / self.temperature
        logps.append(selected_logprobs(logits, ids[:, -logits_to_keep:]))
        if compute_entropy:
            with torch.no_grad():
                entropies.append(entropy_of(logits))
    return torch.cat(logps, dim=0), torch.cat(entropies, dim=0) if compute_entropy else None, None


def _logps_in_place(self: Any, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Compute log-probabilities as TRL 1.0 to 1.9 did."""
    return logps_from_full_logits(self, model, *args, **{**kwargs, "in_place": True})


def selected_logprobs(logits: Any, targets: Any) -> Any:
    """Compute log-probabilities ``[B, T]`` of the targets from ``[B, T, V]`` logits, as TRL's 0.2x releases did.

    Row by row, so that one row's temporaries exist at a time.
    """
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=targets.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return log_softmax_rows(logits, targets)


def entropy_of(logits: Any) -> Any:
    flat = logits.reshape(-1, logits.shape[-1])
    parts = []
    for chunk in flat.split(_ENTROPY_ROWS):
        logp = torch.log_softmax(chunk, dim=-1)
        parts.append(-(torch.exp(logp) * logp).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def loss_with_full_logits(trainer: Any) -> None:
    """Make an ``SFTTrainer`` use the model's own loss over ``[rows, tokens, vocabulary]`` logits."""
    bind(trainer, transformers_names.LOSS, _loss_with_entropy)


def _loss_with_entropy(
    self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Follow TRL 0.2x's ``SFTTrainer.compute_loss``: transformers' loss, then entropy and accuracy of the logits."""
    labels = inputs["labels"]
    inputs["use_cache"] = False
    loss, outputs = transformers_names.LOSS.get()(
        self, model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
    )
    with torch.no_grad():
        mask = inputs["attention_mask"]
        torch.sum(entropy_of(outputs.logits) * mask) / mask.sum()
        shifted = outputs.logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        predictions = shifted.argmax(dim=-1)
        scored = wanted != -100
        correct = (predictions == wanted) & scored
        correct.sum(), scored.sum()
    return (loss, outputs) if return_outputs else loss


def log_softmax_rows(logits: Any, targets: Any) -> Any:
    """Compute log-probabilities ``[B, T]`` of targets from ``[B, T, V]`` logits, row by row with ``log_softmax``."""
    rows = []
    for row, target in zip(logits, targets, strict=True):
        logp = row.log_softmax(dim=-1)
        rows.append(logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows)


def liger_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Call Liger's fused linear GRPO loss as its users do, with the completion's hidden states and the head."""
    loss = optional_names.LIGER_LOSS.get()(
        beta=self.beta,
        compiled=False,
        use_ref_model=self.beta != 0.0,
        loss_type=self.loss_type,
        max_completion_length=self.max_completion_length,
        temperature=self.temperature,
    )
    inner = self.accelerator.unwrap_model(model)
    while hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    keep = inputs["completion_ids"].size(1)
    with self.accelerator.autocast():
        hidden = inner.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden = hidden[:, :-1, :][:, -keep:, :]
        head = inner.get_output_embeddings()
        value, _ = loss(
            _input=hidden,
            lin_weight=head.weight,
            selected_token_ids=inputs["completion_ids"],
            attention_mask=inputs["completion_mask"],
            advantages=inputs["advantages"],
            bias=head.bias,
            old_per_token_logps=inputs.get("old_per_token_logps"),
            ref_per_token_logps=inputs.get("ref_per_token_logps"),
        )
    return value / self.current_gradient_accumulation_steps
