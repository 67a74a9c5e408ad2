"""Numbers as people write them: "24GiB" <-> bytes, "64k" <-> a count, "1e-5" <-> a float.

YAML 1.1 reads `1e-5` as a string, `010` as octal, `12:30` as base 60 and `on` as a boolean. The config room therefore loads
every scalar as text, and the types here give it its meaning once, by the key's type. k is 1,000 in a count
("10k steps", "393k tokens"; `64Ki` is 65,536) and 1,024 in a context length ("4k context" has meant 4,096 since there are any);
bytes go by their suffix.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_BYTES = {"": 1, "b": 1} | {
    p.lower() + s: base**n for n, p in enumerate("KMGT", start=1) for s, base in (("b", 1000), ("ib", 1024), ("i", 1024))
}
_NUMBER = re.compile(r"\s*([+-]?\d[\d_]*(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_LARGEST = 2**63 - 1
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0", ""}


def _scaled(text: str, units: dict[str, int], what: str, example: str) -> int:
    match = _NUMBER.fullmatch(text)
    if not match or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {what}; write it like {example}")
    value = Decimal(match[1].replace("_", "")) * units[match[2].lower()]  # Decimal: 64-bit seeds and 0.1k stay exact
    if value > _LARGEST:
        raise ValueError(f"{text!r} is larger than a 64-bit number can be; write it like {example}")
    if value < 0 or value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole, non-negative number; write it like {example}")
    return int(value)


def parse_count(value: Any) -> int:
    """A whole number of things: 65536, "64k" (64,000), "64Ki" (65,536), "1T", "1_000", "1e6"."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a count; write it like 4096 or 64k")
    return _scaled(str(value), _COUNT, "a count", "4096 or 64k")


def parse_length(value: Any) -> int:
    """A context length in tokens. Its k is 1,024, as in "a 4k context": "4k" is 4,096, "128k" is 131,072."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a length in tokens; write it like 4096 or 4k")
    return _scaled(str(value), {"": 1, "k": 2**10, "ki": 2**10, "m": 2**20, "mi": 2**20}, "a length", "4096 or 4k")


def parse_bytes(value: Any) -> int:
    """A size in bytes: 1024, "24GiB", "80 GB", "500MB". GiB is 2**30, GB is 10**9."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a size; write it like 24GiB")
    return _scaled(str(value), _BYTES, "a size", "24GiB")


def parse_float(value: Any) -> float:
    """A finite real number, "1e-5" included; never a boolean."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number; write it like 1e-5")
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        raise ValueError(f"{value!r} is not a number; write it like 1e-5") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite; write it like 1e-5")
    return number


def parse_flag(value: Any) -> bool:
    """true/yes/on/1 or false/no/off/0/empty, in any case; everything else is an error, never a silent yes."""
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither on nor off; write true or false")


def format_bytes(count: int) -> str:
    """Bytes for a person: "17.7 GiB". Exact whole sizes keep no decimals in a recipe ("24GiB" parses back)."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_count(count: float) -> str:
    """A count for a person: 6.91B, 13.2k, 640."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """Time for a person: 45s, 3m 20s, 2h 05m, 3d 4h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
Count = Annotated[int, BeforeValidator(parse_count)]
Positive = Annotated[int, BeforeValidator(parse_count), Field(ge=1)]
Length = Annotated[int, BeforeValidator(parse_length)]
Real = Annotated[float, BeforeValidator(parse_float)]
Flag = Annotated[bool, BeforeValidator(parse_flag)]
