"""Ask a model, before its first step in pieces, whether a row's results are its own.

Pieces leave out a row's padding and the rows it was padded with. Whether a model's results depend on either is not read
off its name: two short rows go through it as in TRL's micro-batch, with other tokens under the padding, without the
padding, and alone. What differs by more than rounding takes TRL's own step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from memprof.grpo.loss.head import Request
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.rows import Row, row_inputs, rows_of
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.random_state import RandomState
from memprof.grpo.techniques.whole_length import frequencies_of

# Tokens of the two rows: odd numbers, so that blocks of a few tokens do not begin where they did.
_PADDED, _PROMPT, _COMPLETION = 7, 10, 7
_SHORT = 4  # tokens of the completion of the padded row
# What rounding may make of a hidden state, over its norm.
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TF32 = 2e-2
_SMALL_BYTES = 1 << 20  # a buffer above this is a table or a weight, which no forward writes to


class ModelTraits(NamedTuple):
    """What a model was found to do.

    ``counts_padding``: positions that are not given count from the row's left edge, padding included. ``why``: why its
    steps cannot go in pieces, as a clause, or None. ``adapter_inside``: the body that is called without PEFT's wrapper
    does what it does in the wrapper. ``draws``: a forward in training draws random numbers (dropout, a router's
    choice): pieces draw others than the whole micro-batch, from the same distribution.
    """

    counts_padding: bool
    why: str | None = None
    adapter_inside: bool = True
    draws: bool = True


@torch.no_grad()
def ask(step: StepContext, tokens: torch.Tensor) -> ModelTraits:
    """Run a few forwards of 34 tokens and compare. Random state, buffers and modes are as before.

    ``tokens``: ids ``[N]`` to make the two rows of; equal ones serve, the padding's are left out.

    Raises:
        torch.OutOfMemoryError: also these have no room.
    """
    inputs = _rows_like_trls(tokens[tokens != step.pad_id], step.pad_id)
    model = step.policy if step.ranks.forward_together else step.accelerator.unwrap_model(step.policy)
    with ExitStack() as undone:
        undone.enter_context(RandomState.kept(step.accelerator.device))
        undone.enter_context(_unchanged(model))
        undone.enter_context(step.accelerator.autocast())
        try:
            return _compared(step, model, inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the model's own code makes of being called so
            said = " ".join(str(error).split())
            return ModelTraits(True, f"the model cannot be run without padding ({type(error).__name__}: {said[:200]})")


def _compared(step: StepContext, model: nn.Module, inputs: MicroBatch) -> ModelTraits:
    body = step.base_model(model).base_model
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    rows = rows_of(inputs)
    assert rows is not None
    before = RandomState.now(step.accelerator.device)
    whole, logps = _as_trl(model, body, ids, mask)
    if draws := not RandomState.now(step.accelerator.device).equals(before):
        _set_training(model, False)
        whole, logps = _as_trl(model, body, ids, mask)
    meant = [whole[row.index, row.offset : row.offset + row.length] for row in rows]
    meant += [logps[row.index, : row.completion] for row in rows]
    tolerance = _tolerance(step, whole)
    otherwise, _ = _as_trl(model, body, torch.where(mask.bool(), ids, ids[1, 0]), mask)
    if _apart([otherwise[rows[0].index, _PADDED : _PADDED + rows[0].length]], meant[:1]) > tolerance:
        return ModelTraits(True, f"{_name(step)} reads the padding that TRL's rows begin with")
    inside = True
    if not step.ranks.forward_together:
        inside = _apart([body(input_ids=ids[1:]).last_hidden_state[0]], meant[1:2]) <= tolerance
    apart = 0.0
    for counts in (True, False):
        with frequencies_of(step.base_model(model), inputs):
            found = [_in_pieces(step, model, inputs, cut, counts) for cut in ([rows], [[row] for row in rows])]
        apart = max(_apart(one, meant) for one in found)
        if apart <= tolerance:
            return ModelTraits(counts, adapter_inside=inside, draws=draws)
    told = f"{100 * apart:.2g}% of their norm apart"
    return ModelTraits(True, f"{_name(step)}'s results for a row depend on its padding or on longer rows: {told}")


def _rows_like_trls(tokens: torch.Tensor, pad_id: int) -> MicroBatch:
    """Make a micro-batch of two rows: one padded on the left and on the right, one as long as the batch."""
    width = _PROMPT + _COMPLETION
    ids = tokens.repeat(-(-2 * width // max(1, tokens.numel())))[: 2 * width].reshape(2, width).clone()
    mask = torch.ones_like(ids)
    mask[0, :_PADDED] = mask[0, _PROMPT + _SHORT :] = 0
    ids[mask == 0] = pad_id
    return {
        "prompt_ids": ids[:, :_PROMPT],
        "prompt_mask": mask[:, :_PROMPT],
        "completion_ids": ids[:, _PROMPT:],
        "completion_mask": mask[:, _PROMPT:],
    }


def _as_trl(model: nn.Module, body: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
    """Return hidden states ``[rows, tokens, H]`` and completions' log-probabilities, called as TRL's loss does."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :_PROMPT] = -100
    with _states_of(body) as states:
        found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return states[-1], found.log_probs[:, -_COMPLETION:]


def _in_pieces(
    step: StepContext, model: nn.Module, inputs: MicroBatch, pieces: list[list[Row]], counts: bool
) -> list[torch.Tensor]:
    """Return each row's hidden states ``[tokens, H]``, then each row's log-probabilities ``[completion]``."""
    hidden, logps = [], []
    for rows in pieces:
        request = Request(step.head, rows, inputs["completion_ids"], want_entropy=False)
        with _states_of(step.base_model(model).base_model) as states:
            found = model(**row_inputs(inputs, rows, step.pad_id, counts_padding=counts), lean=request)
        hidden += [states[-1][place, : row.length] for place, row in enumerate(rows)]
        logps += found["logps"]
    return hidden + logps


@contextmanager
def _states_of(body: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the hidden states that ``body`` returns inside."""
    found: list[torch.Tensor] = []
    hook = body.register_forward_hook(lambda _module, _args, out: found.append(out.last_hidden_state))
    try:
        yield found
    finally:
        hook.remove()


def _apart(found: list[torch.Tensor], meant: list[torch.Tensor]) -> float:
    """Measure the largest distance of a row's values over their norm; those of other shapes are far apart."""
    if any(a.shape != b.shape for a, b in zip(found, meant, strict=True)):
        return float("inf")
    pairs = [(a.float(), b.float()) for a, b in zip(found, meant, strict=True)]
    apart = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    return apart if apart == apart else float("inf")  # NaN


def _tolerance(step: StepContext, states: torch.Tensor) -> float:
    kind = states.device.type  # the caller may have an autocast of its own
    mixed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    kinds = {mixed, states.dtype, *(p.dtype for p in step.policy.parameters() if p.is_floating_point())}
    allowed = max(_ROUNDING.get(kind, 0.1) for kind in kinds)
    tf32 = states.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(allowed, _TF32) if tf32 else allowed


def _name(step: StepContext) -> str:
    return str(step.base_model().config.get_text_config().model_type)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Train ``model`` inside; leave its modes, its modules' plain attributes and small buffers as they were."""
    kept = [(module, _plain(module), _buffers(module)) for module in model.modules()]
    _set_training(model, True)
    try:
        yield
    finally:
        for module, plain, buffers in kept:
            module.__dict__.update(plain)
            for name, (buffer, values) in buffers.items():
                setattr(module, name, buffer if values is None else buffer.copy_(values))


def _set_training(model: nn.Module, training: bool) -> None:
    for module in model.modules():  # not by `train`, which a module may override
        module.training = training


def _plain(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, torch.Tensor, type(None)))}


def _buffers(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    own = module.named_buffers(recurse=False)
    return {name: (buffer, buffer.clone() if buffer.nbytes <= _SMALL_BYTES else None) for name, buffer in own}
