"""Figures and verdicts in words, for both the terminal and the report."""

from ostro.measure.compare.answers import Prompt
from ostro.measure.compare.run import Comparison

# Two runs of the same side differ by about this much.
_ALIKE = 1.03


def ratio(a: float | None, b: float | None, *, more_is_better: bool = False) -> str:
    """Which side is better, and by how much."""
    if not a or not b:
        return ""
    lead = a / b if more_is_better else b / a
    if 1 / _ALIKE < lead < _ALIKE:
        return "about equal"
    return f"A {lead:.2f}× as fast" if lead > 1 else f"B {1 / lead:.2f}× as fast"


def agreement_verdict(comparison: Comparison) -> str:
    found = comparison.summary
    return f"{found.exact} of {found.prompts} outputs are the same"


def speed_verdict(comparison: Comparison) -> str:
    lead = comparison.speed_ratio
    if lead is None:
        return "Speed cannot be compared"
    if 1 / _ALIKE < lead < _ALIKE:
        return "A and B are about equally fast"
    return f"A is {lead:.2f}× as fast as B" if lead > 1 else f"B is {1 / lead:.2f}× as fast as A"


def settings(comparison: Comparison) -> dict[str, str]:
    params = comparison.params
    return {
        "prompts": str(len(comparison.prompts)),
        "max tokens": str(params.max_tokens),
        "temperature": f"{params.temperature:g}" + (" (greedy)" if params.greedy else ""),
        "top-p": f"{params.top_p:g}",
        "seed": "none" if params.seed is None else str(params.seed),
        "stop": ", ".join(map(repr, params.stop)) or "none",
        "concurrency": str(comparison.concurrency),
    }


def caveats(comparison: Comparison) -> list[str]:
    """Reasons why the figures may not mean what they seem to."""
    notes = []
    if not comparison.params.greedy:
        notes.append(
            "The outputs are sampled: servers draw random numbers in their own ways, so the same seed may not give "
            "the same text. Compare exactly at temperature 0."
        )
    if failed := comparison.summary.prompts - comparison.summary.compared:
        notes.append(f"{failed} of {comparison.summary.prompts} prompts failed on a side; they count as different.")
    if (counts := _token_counts(comparison)) and max(counts) > 1.1 * min(counts):
        notes.append(
            "A and B generated different numbers of tokens, so their latencies are not comparable; compare the "
            "time per token."
        )
    return notes


def prompt_text(prompt: Prompt) -> str:
    """Formats a conversation as lines of role and content."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _token_counts(comparison: Comparison) -> list[int]:
    """Token counts of the sides that answered every prompt."""
    return [
        side.speed.num_tokens
        for side in (comparison.a, comparison.b)
        if not side.speed.failed and side.speed.num_tokens
    ]
