"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from engine.types.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*\Z", re.IGNORECASE)


def parse_bytes(value: str | int) -> int:
    """Bytes from a number, or from text such as "512MiB" (1024s), "4GB" (1000s) or "0.5 GiB".

    Raises:
        ConfigError: the text is not of this form, or the amount is not positive.
    """
    amount = -1
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _SIZE.match(value)) and match[2].lower() in _UNITS:
        amount = int(float(match[1]) * _UNITS[match[2].lower()])
    if amount <= 0:
        asked, remedy = f"use {value!r} as an amount of memory", "write bytes, or e.g. 512MiB, 4GiB, 4GB"
        raise ConfigError(asked, "it is not an amount of memory", remedy)
    return amount
