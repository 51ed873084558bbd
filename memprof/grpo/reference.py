"""Choose where the reference policy is, and run one that stays in host memory layer by layer on the device.

Full fine-tuning needs the reference's log-probabilities once for each generation batch and nothing more of it, yet a
copy on the device weighs as much as the policy all the time. Here one decoder layer computes at a time, while the next
one is copied. All sequences go through it before the next one's turn, so the weights cross the bus once for each
generation batch, and what is held beside the two layers is one hidden state for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memprof.compat import trl
from memprof.compat.transformers import ATTENTION_KIND
from memprof.errors import UsageError
from memprof.foreign import Args, Kwargs
from memprof.grpo.loss.head import add_lean_head
from memprof.grpo.micro_batch_inputs import MicroBatch
from memprof.grpo.rows import Row, is_fake, row_inputs
from memprof.grpo.step.context import StepContext
from memprof.grpo.step.pieces import Piece, pieces_of
from memprof.grpo.step.scoring import blank, score_piece, score_without_graph, write
from memprof.grpo.support import sharding_of
from memprof.grpo.techniques.layers import decoder_layers, replace_forward
from memprof.grpo.techniques.weight_stream import WeightStream
from memprof.grpo.techniques.whole_length import frequencies_of

#: How far two ways through the same layers may differ, relative and absolute: their operators are the same.
_SAME = 1e-2

Call = tuple[Args, Kwargs]


def reference_place(args: Any, adapter: bool) -> tuple[str, str]:
    """Choose where the reference policy is, ``none``, ``adapter``, ``host`` or ``device``, and say why not on the host;
    UsageError where what ``args.reference`` asks for is impossible."""
    wanted = args.reference
    if args.beta == 0.0:
        return "none", ""
    if adapter:
        if wanted in ("host", "device"):
            raise UsageError(
                f"reference={wanted!r} is for full fine-tuning: under an adapter the reference is the same weights "
                "with the adapter off. Use reference='auto'."
            )
        return "adapter", ""
    if wanted == "adapter":
        raise UsageError("reference='adapter' needs an adapter (peft_config). Use reference='auto'.")
    why = _why_on_device(args)
    if wanted == "host" and why:
        raise UsageError(f"reference='host' does not work here: {why}. Use reference='auto'.")
    return ("device", why) if wanted == "device" or why else ("host", "")


def _why_on_device(args: Any) -> str:
    if args.sync_ref_model:
        return "sync_ref_model updates the reference on the device"
    if args.cast_lm_head_to_fp32:
        return "cast_lm_head_to_fp32 changes the reference's head"
    if not args.micro_splitting:
        return "micro_splitting is off"
    if "distributed_config" in (args.model_init_kwargs or {}):
        return "the reference is sharded as the policy is"
    sharding = sharding_of(args)
    return f"{sharding} shards the reference over the ranks" if sharding else ""


def load_reference(policy: Any, args: Any, quantization_config: Any = None) -> Any:
    """Load the policy's checkpoint once more, as TRL loads its reference, but into host memory: weights that need no
    conversion stay mapped from the safetensors files."""
    options = dict(args.model_init_kwargs or {})
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    options.setdefault("trust_remote_code", args.trust_remote_code)
    options.setdefault("dtype", policy.dtype)
    options.setdefault("attn_implementation", ATTENTION_KIND.of(policy.config))
    options["device_map"] = None
    model = trl.CREATE_REFERENCE.get()(trl.MODEL_ID.get()(policy.config), **options)
    trl.FUSED_HEAD.get()(model, temperature=args.temperature)
    add_lean_head(model)
    return model.eval().requires_grad_(False)


class HostReference:
    """Run the reference policy on ``device`` while its weights stay in host memory.

    ``module``, the trainer's ``ref_model``, is the model itself. Log-probabilities pass its layers over the device one
    by one. A call of the model, of its body or of ``generate`` copies all weights to the device for that call, and
    computes no gradient.

    Before its first pass one sequence is run both ways, as layers one by one and by the model's own forward. Where the
    two differ, or layers cannot be run so, all of it moves to the device for good, and the log says why.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device
        self._stream = WeightStream(device)
        self._looked, self._on_device = False, False
        self._is_running = False  # a pass, which brings the weights that it needs
        self._fault: str | None = None
        try:
            self.layers = decoder_layers(module)
        except UsageError:
            self.layers, self._fault = [], "its layers are not all decoder layers with attention"
        inside = {id(tensor) for layer in self.layers for tensor in _tensors(layer)}
        self._around = [tensor for tensor in _tensors(module) if id(tensor) not in inside]
        for called in {id(called): called for called in (module, module.base_model)}.values():
            replace_forward(called, self._called)
        module.generate = self._generate

    def _called(self, _: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward that somebody else than :meth:`logps` asks for."""
        if self._is_running or self._on_device:
            return inner(*args, **kwargs)
        given = (*args, *kwargs.values())
        if torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            raise UsageError(
                "The reference policy is in host memory and computes no gradient with respect to its inputs. "
                "Set reference='device'."
            )
        with torch.no_grad(), self.whole():
            return inner(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.whole() as module:
            return type(module).generate(module, *args, **kwargs)

    @torch.no_grad()
    def logps(self, step: StepContext, inputs: MicroBatch, rows: Sequence[Row]) -> torch.Tensor:
        """Return log-probabilities ``[B, T]`` of the rows' completions, 0 where there is no token."""
        live = [row for row in rows if row.completion]
        with self._running():
            if live and not self._looked:
                self._look(step, inputs, min(live, key=lambda row: row.length))
            if self._on_device:
                return score_without_graph(step, self.module, inputs, rows, want_entropy=False)[0]
            return self._by_layers(step, inputs, rows)

    def _look(self, step: StepContext, inputs: MicroBatch, row: Row) -> None:
        """Find out with one ``row`` whether layers can be run one by one; else move to the device, and say why."""
        self._looked = True
        if self._fault is None and not is_fake(inputs["prompt_ids"]):
            try:
                self._fault = self._difference(step, inputs, row)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the model's own code makes of being called so
                said = " ".join(str(error).split())
                self._fault = f"its layers cannot be run one by one ({type(error).__name__}: {said})"
        if self._fault is not None:
            step.log.warn(f"the reference stays on the device: {self._fault}")
            self.module.to(self.device)
            self._on_device = True

    def _difference(self, step: StepContext, inputs: MicroBatch, row: Row) -> str | None:
        """Compare a row's log-probabilities with those of the model's own forward, also with a layer at a time here."""
        mine = self._by_layers(step, inputs, [row])
        undo = [replace_forward(layer, self._brought) for layer in self.layers]
        try:
            with self._here(self._around):
                scored = score_piece(step, self.module, inputs, Piece([row]), want_entropy=False, may_pack=False)
        finally:
            for take_off in undo:
                take_off()
        theirs = scored.logps[0]
        same = torch.allclose(mine[row.index, : row.completion], theirs, rtol=_SAME, atol=_SAME)
        return None if same else "its layers give other values when they are run one by one"

    def _brought(self, layer: torch.nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._here(_tensors(layer)):
            return inner(*args, **kwargs)

    def _by_layers(self, step: StepContext, inputs: MicroBatch, rows: Sequence[Row]) -> torch.Tensor:
        found, unused = blank(inputs), blank(inputs)
        pieces = pieces_of([row for row in rows if row.completion], step.piece_tokens[1])
        if not pieces:
            return found
        with self._here(self._around), step.accelerator.autocast():
            states, calls = self._start(step, inputs, pieces)
            weights = [[tensor.data for tensor in _tensors(layer)] for layer in self.layers]
            for number, (layer, copies) in enumerate(zip(self.layers, self._stream.over(weights), strict=True)):
                with self._here(_tensors(layer), copies):
                    for piece in range(len(pieces)):
                        positional, named = calls[piece][number]
                        states[piece] = _first(layer(states[piece], *positional, **named))
                        calls[piece][number] = ((), {})
            for piece, rows_of_piece in enumerate(pieces):
                whole = Piece(rows_of_piece)
                with self._layers_do(lambda *_, final=states[piece]: final):  # its rows are padded to one length
                    scored = score_piece(step, self.module, inputs, whole, want_entropy=False, may_pack=False)
                write(scored, found, unused)
        return found

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Copy the whole model to the device, for inputs that cannot be cut into pieces and for others' calls."""
        tensors = [] if self._is_running or self._on_device else _tensors(self.module)
        with self._running(), self._here(tensors):
            yield self.module

    @contextmanager
    def _running(self) -> Iterator[None]:
        before, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = before

    def _start(
        self, step: StepContext, inputs: MicroBatch, pieces: Sequence[Sequence[Row]]
    ) -> tuple[list[torch.Tensor], list[list[Call]]]:
        """Return, for every piece, the first layer's input and each layer's other arguments."""
        states, calls = [], []
        for piece in pieces:
            seen: list[Call] = []
            first: list[torch.Tensor] = []

            def note(
                index: int, hidden: torch.Tensor, call: Call, seen: Any = seen, first: Any = first
            ) -> torch.Tensor:
                if index == 0:
                    first.append(hidden)
                seen.append(call)
                return hidden

            with self._layers_do(note), frequencies_of(self.module, inputs):
                ids = row_inputs(inputs, piece, step.pad_id, counts_padding=step.counts_padding)
                self.module.base_model(**ids, use_cache=False)
            states.append(first[0])
            calls.append(seen)
        return states, calls

    @contextmanager
    def _layers_do(self, what: Callable[[int, torch.Tensor, Call], torch.Tensor]) -> Iterator[None]:
        """Replace each layer's forward by ``what(index, hidden states, other arguments)``."""

        def replaced(index: int) -> Callable[..., torch.Tensor]:
            def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                return what(index, hidden_states, (args, kwargs))

            return forward

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = replaced(index)
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)

    @contextmanager
    def _here(
        self, tensors: Sequence[torch.Tensor] | Iterator[torch.Tensor], copies: list[torch.Tensor] | None = None
    ) -> Iterator[None]:
        """Put copies of ``tensors`` on the device in their place, for a while; ``copies``: those there already."""
        kept = [(tensor, tensor.data) for tensor in tensors]
        try:
            for number, (tensor, host) in enumerate(kept):
                tensor.data = host.to(self.device, copy=True) if copies is None else copies[number]
            yield
        finally:
            for tensor, host in kept:
                tensor.data = host


def _tensors(module: Any) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _first(found: Any) -> torch.Tensor:
    """Return a layer's hidden states: older layers return a tuple."""
    states: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return states
