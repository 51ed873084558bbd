"""Colours of categories and phases, light and dark, and the patterns that tell them apart without colour."""

from __future__ import annotations

__all__ = ["DARK", "FALLBACK", "LIGHT", "PATTERNS", "PHASES", "css_variables", "ink_on", "slug"]

# Neighbours in the stack differ in lightness as well as hue, so that they survive colour-blindness.
LIGHT: dict[str, str] = {
    "weights": "#0b4f8a",
    "adapters": "#6db3ee",
    "reference_model": "#5b3a9b",
    "reward_model": "#a98be0",
    "value_model": "#d3c4f3",
    "optimizer_state": "#12808c",
    "inference_engine": "#76cda4",
    "workspace": "#8a7a5c",
    "inputs": "#d9b8c8",
    "kv_cache": "#00794f",
    "gradients": "#7a4a1c",
    "weight_casts": "#9fb4c9",
    "activations": "#f0b429",
    "loss_logits": "#b3231f",
    "activation_gradients": "#e07b00",
    "temporaries": "#f3d9a4",
    "communication": "#4d5763",
    "unattributed": "#8c9196",
}
DARK: dict[str, str] = {
    "weights": "#3b8fdb",
    "adapters": "#8fc7f7",
    "reference_model": "#8a68d6",
    "reward_model": "#b79cf0",
    "value_model": "#ddd0f8",
    "optimizer_state": "#25a3b0",
    "inference_engine": "#8fdcb8",
    "workspace": "#a8977a",
    "inputs": "#e0c3d1",
    "kv_cache": "#1fa97a",
    "gradients": "#b0763d",
    "weight_casts": "#a9bccf",
    "activations": "#f0b429",
    "loss_logits": "#e5635c",
    "activation_gradients": "#e07b00",
    "temporaries": "#ecd29c",
    "communication": "#75818f",
    "unattributed": "#8c9196",
}
FALLBACK = "#8c9196"

# Plotly's fill patterns; "" is a plain fill.
PATTERNS: dict[str, str] = {
    "weights": "",
    "adapters": "/",
    "reference_model": "x",
    "reward_model": "\\",
    "value_model": "|",
    "optimizer_state": ".",
    "inference_engine": "-",
    "workspace": "+",
    "inputs": ".",
    "kv_cache": "|",
    "gradients": "\\",
    "weight_casts": "/",
    "activations": "-",
    "loss_logits": "x",
    "activation_gradients": "/",
    "temporaries": "+",
    "communication": "|",
    "unattributed": ".",
}

PHASES: dict[str, str] = {
    "load": "#9aa3ad",
    "generate": "#1f9d76",
    "reward": "#9aa3ad",
    "old_logprobs": "#c77fd0",
    "reference_logprobs": "#8f6bd1",
    "forward": "#f0b429",
    "backward": "#e07b00",
    "optimizer_step": "#6db3ee",
    "weight_sync": "#4d5763",
    "sleep": "#4d5763",
    "wake": "#4d5763",
    "evaluate": "#76cda4",
    "save": "#9aa3ad",
    "other": "#c5cbd2",
}


def slug(identifier: str) -> str:
    """An id as part of a CSS class; anything unexpected becomes ``unattributed``."""
    return identifier if identifier in LIGHT or identifier in PHASES else "unattributed"


def css_variables(colours: dict[str, str]) -> str:
    """``--c-weights: #0b4f8a; --on-weights: #ffffff; ...``: each colour, and what can be read on it."""
    return " ".join(f"--c-{name}: {colour}; --on-{name}: {ink_on(colour)};" for name, colour in colours.items())


def ink_on(colour: str) -> str:
    """White or near-black, whichever has the higher contrast on ``#rrggbb`` (WCAG 2's relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) >= (luminance + 0.05) / 0.058 else "#15191e"
