"""What a grammar may cost. The numbers stand here only; `lint` and `compiler` apply them."""

from dataclasses import dataclass

MAX_DEPTH = 64
"""Of a schema's nesting."""
MAX_MULTIPLE_OF = 10_000
"""Numerator of multipleOf: as many states are built while a schema is compiled."""
MAX_PATTERN_PROPERTIES = 64
"""Of one object: each is compared with each."""
MAX_OPTIONAL_PROPERTIES = 500
"""Of one object: the parser holds two items for each, and takes 2000 at most."""
MAX_ENUM_VALUES = 20_000
MAX_PATTERN_CHARACTERS = 1024
"""Of a regex within a schema."""
MAX_REPETITIONS = 10_000
"""Upper bound in {m,n} of a regex or a grammar: each takes more than 1 kB."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one mask may cost before the sequence fails: in llguidance's units."""

    max_items: int = 50_000
    """Of the parser: some 20 µs a thousand."""
    items_in_row: int = 2_000
    """Of the parser after one token: what an ambiguous grammar costs grows with their square."""
    lexer_fuel: int = 200_000
    """14,000 take a millisecond."""
    lexer_states: int = 100_000
    """Of the whole grammar, 1 to 2 kB each."""


STEPS = StepLimits()
USERS_STEPS = StepLimits(max_items=5_000, items_in_row=500, lexer_fuel=50_000, lexer_states=50_000)
"""For grammars and regexes that a user wrote, which can be made to cost much more than any schema."""
