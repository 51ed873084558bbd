"""Read sizes as error messages print them: the programs divide by 1024, whatever they call the unit."""

from __future__ import annotations

import math
import re

# In text without spaces, lower case: ``74.16gib``, ``6291456bytes``, ``3149468kb``, ``morethan1eb``.
SIZE = r"(?:\d[\d,]{0,24}(?:\.\d{1,9})?|morethan1)(?:bytes?|[kmgtpe]ib?|[kmgtpe]b|[kmgtpe](?![a-z])|b(?![a-z]))"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}


def bytes_of(text: str) -> int:
    """Return the bytes of ``74.16gib``; a number without a unit is bytes already."""
    plain = text.replace(",", "").replace("morethan", "").strip()
    digits = len(plain) - len(plain.lstrip("0123456789."))
    number, unit = plain[:digits], plain[digits:].strip()
    power = _POWERS.get(unit[:1], 0) if unit not in ("bytes", "byte", "b") else 0
    return round(float(number.rstrip(".") or 0) * int(1024**power))


def bytes_of_tensor(shape: str, dtype: str) -> int:
    """Return the bytes of a tensor of ``shape`` (``64,512``) and ``dtype`` (TensorFlow's or numpy's), 0 if unknown."""
    bits = {"half": 16, "bfloat16": 16, "float": 32, "double": 64, "bool": 8}.get(dtype, 0)
    bits = bits or next((int(digits) for digits in re.findall(r"\d{1,3}$", dtype)), 0)
    return math.prod(int(size) for size in shape.split(",") if size.strip()) * bits // 8
