"""Simulate FSDP2 on one of many ranks: torch's ``fully_shard`` is executed as accelerate calls it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memprof.compat import accelerate as accelerate_names
from memprof.compat import patching
from memprof.compat import torch_sharding as sharding_names
from memprof.config.settings import TrainerSettings
from memprof.simulate.recorder.session import FakeSession
from memprof.vocabulary import Category


def shard(model: Any, mesh: Any, settings: TrainerSettings) -> None:
    """Shard a model by accelerate's own code: its layers, its embeddings, its head, and what is left.

    The settings are those of TRL's ``fsdp2.yaml``. transformers changes the wrapping policy for an adapter under FSDP1
    only. Call it with recording paused, since no rank of a real run holds the whole model.
    """
    plugin = accelerate_names.FSDP_PLUGIN.get()(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    if settings.mixed_precision != "no":
        accelerate_names.FSDP_PRECISION.of(plugin)(settings.mixed_precision)
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=types.SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision=settings.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    accelerate_names.FSDP_PREPARE.get()(accelerator, model)


@contextmanager
def gathered_owned(session: FakeSession) -> Iterator[None]:
    """Claim what FSDP2 gathers as the parameter it is, and what it stages as communication, while open."""
    claims = _Claims(session)
    numbers = {id(torch.cpu.current_stream()): 0}

    def stream() -> int:
        """Number the streams in order of use: FSDP2 gathers and reduces on streams with pools of their own."""
        return numbers.setdefault(id(torch.cpu.current_stream()), len(numbers))

    session.fake_recorder.blocks.stream_of = stream
    with patching(
        (sharding_names.GATHER, claims.gathering(sharding_names.GATHER.get())),
        (sharding_names.REDUCE, claims.reducing(sharding_names.REDUCE.get())),
        (sharding_names.ALLOCATE, claims.allocating(sharding_names.ALLOCATE.get())),
    ):
        yield


class _Claims:
    """Wrap FSDP2's own methods, and claim what they make."""

    def __init__(self, session: FakeSession) -> None:
        self._recorder, self._book = session.fake_recorder, session.book

    def gathering(self, gather: Any) -> Any:

        def gathered(parameter: Any) -> None:
            gather(parameter)
            category = self._book.category_of(sharding_names.SHARDED_PARAMETER.of(parameter))
            for tensor in sharding_names.GATHERED.of(parameter):
                self._claim(tensor, category, "unsharded", f"{_name_of(parameter)} (gathered)")

        return gathered

    def reducing(self, reduce: Any) -> Any:

        def reduced(group: Any, *args: Any, **kwargs: Any) -> Any:
            for parameter in sharding_names.FSDP_PARAMETERS.of(group):
                whole = sharding_names.UNSHARDED.of(parameter)
                if whole is not None and whole.grad is not None:
                    self._claim(whole.grad, Category.GRADIENTS, "unsharded", _name_of(parameter))
            return reduce(group, *args, **kwargs)

        return reduced

    def allocating(self, allocate: Any) -> Any:
        reduced_into = sharding_names.REDUCE_INPUT.name  # that memory becomes the gradients

        def allocated(owner: Any, *args: Any, **kwargs: Any) -> Any:
            made = allocate(owner, *args, **kwargs)
            if reduced_into not in sys._getframe(1).f_locals:
                self._claim(made, Category.COMMUNICATION, None, type(owner).__name__)
            return made

        return allocated

    def _claim(self, tensor: Any, category: Category, detail: str | None, name: str) -> None:
        if address := self._recorder.storages.address_of(tensor.untyped_storage()):
            self._book.claim_address(address, category, detail, name)


def _name_of(parameter: Any) -> str:
    return str(sharding_names.PARAMETER_NAME.of(parameter))
