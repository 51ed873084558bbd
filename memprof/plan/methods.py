"""List the methods a plan compares, each a set of settings over what the user fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings, Value
from memprof.errors import UsageError


@dataclass(frozen=True)
class Method:
    """Hold a row of the table: its name and its settings. Rows that train more come first."""

    name: str
    settings: Mapping[str, Value]


_LORA: dict[str, Value] = {"lora_r": 16, "dtype": "bfloat16", "optim": "adamw_torch_fused"}
METHODS = (
    Method("full", {"dtype": "float32", "optim": "adamw_torch_fused", "gradient_checkpointing": False}),
    Method("full + checkpointing", {"dtype": "float32", "optim": "adamw_torch_fused", "gradient_checkpointing": True}),
    Method("full + 8-bit Adam", {"dtype": "bfloat16", "optim": "adamw_8bit", "gradient_checkpointing": False}),
    Method(
        "full + 8-bit + checkpointing", {"dtype": "bfloat16", "optim": "adamw_8bit", "gradient_checkpointing": True}
    ),
    Method("LoRA", {**_LORA, "gradient_checkpointing": False}),
    Method("LoRA + checkpointing", {**_LORA, "gradient_checkpointing": True}),
    Method("QLoRA + checkpointing", {**_LORA, "load_in_4bit": True, "gradient_checkpointing": True}),
    Method("LoRA, lean trainer", {**_LORA, "recipe": "lean", "gradient_checkpointing": True}),
    Method("QLoRA, lean trainer", {**_LORA, "load_in_4bit": True, "recipe": "lean", "gradient_checkpointing": True}),
)


def methods_for(
    base: Settings, fixed: set[str], left_out: dict[str, str] | None = None
) -> list[tuple[Method, Settings]]:
    """Return each method with its settings, without those that contradict what the user fixed.

    A method is named after what it is with the fixed settings: one with another optimizer is not called 8-bit Adam.

    Args:
        base, fixed: the settings, and the names of those that the user gave.
        left_out: receives the reason, by the method's name, why a method cannot be simulated with them.

    Raises:
        UsageError: a method cannot be simulated with them, and ``left_out`` was not given.
    """
    if base.divided:  # which few-bit optimizers are not simulated with
        fixed = fixed | {"optim"}
    rows: list[tuple[Method, Settings]] = []
    seen: set[str] = set()
    for method in METHODS:
        against = [n for n, v in method.settings.items() if n in fixed and n not in _REFINED and _differ(base, n, v)]
        if against or ("lora_r" in fixed and base.lora_r is not None and "lora_r" not in method.settings):
            continue
        changes = {name: value for name, value in method.settings.items() if name not in fixed}
        if base.mixed_precision == "fp16" and changes.get("dtype") == "bfloat16":
            # Its loss scaler refuses gradients in float16; an adapter's are in float32, whatever the base.
            changes["dtype"] = "float32" if changes.get("lora_r", base.lora_r) is None else "float16"
        try:
            settings = base.with_(**changes)
        except UsageError as error:
            if left_out is None:
                raise
            left_out[method.name] = str(error)
            continue
        key = repr(settings)
        if key not in seen:
            seen.add(key)
            rows.append((Method(_named(method, settings, fixed), method.settings), settings))
    return rows


def _named(method: Method, settings: Settings, fixed: set[str]) -> str:
    name = method.name
    if "8-bit" in name and optimizer(settings.optim).bits != optimizer(str(method.settings["optim"])).bits:
        instead = ", bfloat16" if settings.dtype == "bfloat16" and "dtype" not in fixed else ""
        name = name.replace(" + 8-bit Adam", instead).replace(" + 8-bit", instead)
    return f"Q{name}" if settings.load_in_4bit and name.startswith("LoRA") else name


def _differ(base: Settings, name: str, value: Value) -> bool:
    given = getattr(base, name)
    # A method sets whether layers are checkpointed; the user's choice of the kind refines it.
    return bool(given != value if name != "gradient_checkpointing" else bool(given) != value)


# A value of one of these refines a method and does not contradict it.
_REFINED = {"lora_r", "dtype", "optim"}
