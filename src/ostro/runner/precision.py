"""Describes a model's number formats in words. Imports no torch."""

from collections.abc import Iterable


def in_words(weights: Iterable[str], cells: str | None) -> str:
    """Such as: Q4_1 and Q8_0 weights, float16 keys and values. `cells` is None for a model without a KV cache."""
    kept = f"{' and '.join(weights)} weights"
    return kept if cells is None else f"{kept}, {cells} keys and values"
