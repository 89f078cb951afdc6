"""Limits on the cost of a grammar. They are defined only here; `schema`, `gbnf` and `compiler` apply them."""

from dataclasses import dataclass

MAX_DEPTH = 64
"""Nesting of a schema, or of groups in a GBNF grammar."""
MAX_MULTIPLE_OF = 10_000
"""Numerator of multipleOf: compiling the schema builds as many states."""
MAX_PATTERN_PROPERTIES = 64
"""Patterns per object: every pair is compared."""
MAX_OPTIONAL_PROPERTIES = 500
"""Optional properties per object: the parser holds two items for each, and at most 2000."""
MAX_ENUM_VALUES = 20_000
MAX_PATTERN_CHARACTERS = 1024
"""Length of a regex in a schema."""
MAX_REPETITIONS = 10_000
"""Upper bound in {m,n} of a regex or a grammar: each repetition takes more than 1 kB."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits on the cost of one mask, in llguidance's units. A sequence that exceeds them fails."""

    max_items: int = 50_000
    """Parser items: a thousand take about 20 µs."""
    items_in_row: int = 2_000
    """Parser items after one token: the cost of an ambiguous grammar grows with their square."""
    lexer_fuel: int = 200_000
    """Lexer fuel: 14,000 units take a millisecond."""
    lexer_states: int = 100_000
    """Lexer states of the whole grammar: 1 to 2 kB each."""


STEPS = StepLimits()
USERS_STEPS = StepLimits(max_items=5_000, items_in_row=500, lexer_fuel=50_000, lexer_states=50_000)
"""Limits for grammars and regexes written by a user, which can be made to cost far more than any schema."""
