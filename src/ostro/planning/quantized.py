"""What becomes of a quantised checkpoint's numbers on the runner that was planned, in words."""

from collections import Counter

from ostro.weights.stored import Stored


def stored_as(stored: Stored, *, natively: bool) -> str | None:
    """The checkpoint's format and how it is kept in memory; None if it is not a quantised Hub checkpoint."""
    if stored.quantization is None:
        return None
    if not natively:
        return f"{stored.quantization}; widened"
    packings: Counter[str] = Counter()
    for tensor in stored.tensors:
        if tensor.repacked is not None:
            packings[f"{tensor.repacked} ({tensor.format})"] += tensor.values
    return "; ".join((stored.quantization, *(how for how, _ in packings.most_common())))
