"""What a recipe says, as text for terminals and pages."""

from ostro.recipes.recipe import Expectation, Measured, Recipe

_GIB = 1 << 30
# Sequence lengths for which the text says how many fit.
_LENGTHS = (2048, 16384)


def expected(plan: Expectation) -> str:
    """What to expect of a setup, in words."""
    lengths = [each for each in _LENGTHS if each < plan.longest]
    fit = ", ".join(f"{sequences(plan.sequences(each))} of {each:,} tokens" for each in lengths)
    return (
        f"{gib(plan.weights)} of weights, {gib(plan.total)} in all once the KV cache is full; sequences of up to "
        f"{plan.longest:,} tokens" + (f"; at a time {fit}" if fit else "")
    )


def sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def sampling(recipe: Recipe) -> str:
    """The model's sampling defaults, in words."""
    given = ", ".join(f"{name} {value:g}" for name, value in recipe.sampling.items())
    return f"{given or 'no defaults of its own'} ({recipe.sampling_source})"


def measured(found: Measured) -> str:
    return f"{found.figure:,g} {found.unit} ({found.what}, {found.machine}; {found.source})"


def gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
