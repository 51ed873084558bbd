"""Read sizes as error messages print them: the programs divide by 1024, whatever they call the unit."""

from __future__ import annotations

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
