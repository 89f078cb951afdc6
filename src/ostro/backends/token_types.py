"""Which text of a pair a token belongs to. Imports no torch and no numpy."""

from ostro.engine.batch import Chunk


def token_types(chunk: Chunk) -> list[int]:
    """Zeros for the first text's tokens, ones for the second's."""
    second = chunk.seq.request.second_at
    return [0] * chunk.length if not second else [0] * second + [1] * (chunk.length - second)
