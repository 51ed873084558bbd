"""The tools an assistant can call, each one of memprof's commands."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from memprof._version import __version__
from memprof.assistants.commands import Limits, Reader
from memprof.errors import MemprofError, UsageError
from memprof.redact import redact_text

_INSTRUCTIONS = (
    "memprof says where GPU memory went in LLM training (GRPO, SFT, DPO): from torch memory snapshots, from "
    "out-of-memory messages, or by simulating a run without a GPU. Begin with `oom` for an error text, with `report` "
    "for a snapshot or a folder of them. Figures are GiB (2^30). It only reads files below the folders it was started "
    "with."
)
_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
_MOST_TEXT = 20_000_000
_MOST_RUNS = 8
# Settings of a simulation, by their names on the command line; what names files is not among them.
_SETTINGS = (
    "dtype", "lora_r", "lora_target_modules", "load_in_4bit", "num_generations", "per_device_train_batch_size",
    "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "prompt_length", "completion_length",
    "gradient_checkpointing", "beta", "optim", "attn", "padding", "generation", "recipe", "gpus", "sharding",
    "alloc_conf", "gpu", "trainer", "max_length", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
    "memory_budget",
)  # fmt: skip


def make_server(roots: list[Path], limits: Limits, redact: bool = False) -> MCPServer:
    """Return the server; ``roots`` are the folders and files it may read, ``redact`` is that of :class:`Reader`."""
    server = MCPServer("memprof", instructions=_INSTRUCTIONS, version=__version__, log_level="ERROR")
    tools = _Tools(Reader(roots, limits, redact))
    for tool in (tools.report, tools.explain, tools.compare, tools.oom, tools.simulate, tools.advise):
        server.tool(annotations=_READS, structured_output=False)(tool)
    return server


class _Tools:
    """The tools; their signatures and docstrings are what an assistant is shown."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def report(self, path: str, step: int | None = None, role: str | None = None) -> str:
        """Show where the memory of a run went: by category and phase, largest allocations, what lowers the peak.

        Args:
            path: a torch memory snapshot (pickle), a memprof report's JSON, or a folder of snapshots of several ranks.
            step: the training step to show, of a folder.
            role: the role to show, of a folder: actor, critic, reference, rollout.
        """
        chosen = [*_option("step", step), *_option("role", role)]
        return await self._told(self._run("report", *chosen, "--format", "markdown", "--", paths=[path]))

    async def explain(self, path: str, at: str = "peak", category: str | None = None, top: int = 20) -> str:
        """List the allocations of a snapshot that are alive at one instant: bytes, category, how that is known, stack.

        Args:
            path: a torch memory snapshot.
            at: peak, device-peak, phase:NAME or a time in microseconds.
            category: one category only, such as weights, activations, loss_logits, kv_cache.
            top: how many, largest first.
        """
        chosen = [*_option("at", at), *_option("category", category), *_option("top", top)]
        hint = "Ask for a category, or a smaller top."
        return await self._told(self._run("explain", *chosen, "--format", "markdown", "--", paths=[path], hint=hint))

    async def compare(self, paths: list[str], fail_above: str | None = None) -> str:
        """Put runs side by side: what differs by category, in the settings, and what one holds that the other does not.

        Args:
            paths: two or more snapshots or reports' JSON; the others are compared with the first.
            fail_above: say whether a later run's peak exceeds the first's by more than this, such as 2%.
        """
        if not 2 <= len(paths) <= _MOST_RUNS:
            raise ToolError(f"give 2 to {_MOST_RUNS} paths, not {len(paths)}.")
        chosen = _option("fail-above", fail_above)
        return await self._told(self._run("compare", *chosen, "--format", "markdown", "--", paths=paths))

    async def oom(self, text: str | None = None, path: str | None = None) -> str:
        """Explain an out-of-memory failure: what each number means, the cause, the phase, and what to try, in order.

        It reads torch's messages on every backend, those of vLLM, SGLang, NCCL and other libraries, and what Ray,
        Slurm, Kubernetes and the kernel say when they kill a process. Give one of the two.

        Args:
            text: the message, best with the traceback and the lines around it.
            path: a log file that holds it.
        """
        if (text is None) == (path is None):
            raise ToolError("give either a text or a path.")
        if text is not None and len(text) > _MOST_TEXT:
            raise ToolError(f"the text is longer than {_MOST_TEXT:,} characters; save it to a file and give its path.")
        if path is not None:
            return await self._told(self._run("oom", "--format", "markdown", "--", paths=[path]))
        return await self._told(self._reader.run("oom", "--format", "markdown", "-", text=text))

    async def simulate(self, model: str, settings: dict[str, str | int | float | bool] | None = None) -> str:
        """Predict the memory of a training run without a GPU, by running its step on fake tensors; takes a minute.

        Args:
            model: a hub id such as Qwen/Qwen2.5-7B-Instruct, or a folder with a config.json.
            settings: by the names of GRPOConfig, LoraConfig and TrainingArguments: num_generations,
                per_device_train_batch_size, prompt_length, completion_length, gradient_checkpointing, lora_r,
                load_in_4bit, optim, generation, gpus, sharding, recipe; gpu (24GB, a name) says whether it fits.
        """
        return await self._told(self._simulate(model, settings or {}))

    async def _simulate(self, model: str, settings: dict[str, str | int | float | bool]) -> str:
        unknown = sorted(set(settings) - set(_SETTINGS))
        if unknown:
            raise UsageError(f"{', '.join(unknown)[:200]}: no such setting; there are {', '.join(_SETTINGS)}.")
        if Path(model).exists() or model.startswith((".", "/", "~")) or ".." in model:
            model = self._reader.path(model)
        chosen = [option for name, value in settings.items() for option in _option(name.replace("_", "-"), value)]
        return await self._reader.run("simulate", f"--model={model}", *chosen, "--format", "markdown")

    async def advise(self, path: str, gpu: str | None = None, seconds: int = 60) -> str:
        """Find what to change so that a recorded run needs less memory, by simulating each change. Takes minutes.

        Args:
            path: a snapshot that memprof recorded, or its report's JSON.
            gpu: a card to fit, by name or size: 24GB, H100.
            seconds: how long to try combinations.
        """
        chosen = [*_option("gpu", gpu), *_option("seconds", min(max(seconds, 1), 240))]
        return await self._told(self._run("advise", *chosen, "--format", "markdown", "--", paths=[path]))

    async def _run(self, *arguments: str, paths: list[str], hint: str = "") -> str:
        named = [self._reader.path(path) for path in paths]
        return await self._reader.run(*arguments, *named, hint=hint)

    async def _told(self, answer: Awaitable[str]) -> str:
        """Return the answer, or raise memprof's own sentence about what is wrong."""
        try:
            return await answer
        except MemprofError as error:
            raise ToolError(redact_text(str(error)) if self._reader.redact else str(error)) from None


def _option(name: str, value: Any) -> list[str]:
    """Return an option of the command line; its value can never be taken for another option."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}"] if value else ([f"--no-{name}"] if name.endswith(("checkpointing", "mode")) else [])
    return [f"--{name}={value}"]
