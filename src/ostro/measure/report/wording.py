"""Formats numbers and untrusted text safely for both a terminal and a page."""

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{_three_digits(seconds * 1e3)} ms" if seconds < 0.9995 else f"{_three_digits(seconds)} s"


def rate(value: float) -> str:
    return _three_digits(value)


def percent(share: float) -> str:
    """Rounded, but only 1 gives 100 % and only 0 gives 0 %."""
    rounded = f"{share * 100:.1f}".removesuffix(".0")
    if rounded == "100" and share < 1:
        return "99.9 %"
    return "0.1 %" if rounded == "0" and share > 0 else f"{rounded} %"


def visible(text: str) -> str:
    """Replaces characters that would hide, reorder or break the surrounding text with their code points."""
    return _UNSAFE.sub(lambda match: f"‹U+{ord(match[0]):04X}›", text)


def on_one_line(text: str) -> str:
    return visible(text.replace("\n", "⏎").replace("\t", " ").replace("\r", ""))


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"
