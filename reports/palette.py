"""Colours of categories and phases, light and dark, and the patterns that tell them apart without colour."""

from __future__ import annotations

# Any two differ by at least 11 in CIE Lab, also as seen with protanopia, deuteranopia and tritanopia (tested). Greys do
# not tell them apart: that is what the patterns are for.
LIGHT: dict[str, str] = {
    "weights": "#0b4f8a",
    "adapters": "#69b2ec",
    "reference_model": "#523ca1",
    "reward_model": "#8b84dd",
    "value_model": "#d4c6f6",
    "optimizer_state": "#008899",
    "inference_engine": "#76cda4",
    "workspace": "#938369",
    "inputs": "#d9b8c8",
    "kv_cache": "#067648",
    "gradients": "#6f4311",
    "weight_casts": "#9bafcc",
    "activations": "#f0b429",
    "loss_logits": "#b82627",
    "activation_gradients": "#e07b00",
    "temporaries": "#f6dca6",
    "communication": "#4d5763",
    "unattributed": "#8c9196",
}
DARK: dict[str, str] = {
    "weights": "#3584cb",
    "adapters": "#86c9fb",
    "reference_model": "#856ae2",
    "reward_model": "#ae9af2",
    "value_model": "#dfd6ff",
    "optimizer_state": "#25a3b0",
    "inference_engine": "#97e0b9",
    "workspace": "#a9997f",
    "inputs": "#e0c3d1",
    "kv_cache": "#47c877",
    "gradients": "#b67939",
    "weight_casts": "#a2bbd7",
    "activations": "#f0b429",
    "loss_logits": "#dd5c58",
    "activation_gradients": "#e07b00",
    "temporaries": "#f3cc9a",
    "communication": "#707e8c",
    "unattributed": "#909291",
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
    """Return an id as part of a CSS class; anything unexpected becomes ``unattributed``."""
    return identifier if identifier in LIGHT or identifier in PHASES else "unattributed"


def css_variables(colours: dict[str, str]) -> str:
    """Write each colour, and what can be read on it: ``--c-weights: #0b4f8a; --on-weights: #ffffff; ...``."""
    return " ".join(f"--c-{name}: {colour}; --on-{name}: {ink_on(colour)};" for name, colour in colours.items())


def ink_on(colour: str) -> str:
    """Choose white or black, whichever has the higher contrast on ``#rrggbb`` (WCAG 2's relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) >= (luminance + 0.05) / 0.05 else "#000000"
