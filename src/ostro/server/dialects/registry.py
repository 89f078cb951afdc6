"""Which dialects the server speaks, and which one a request is in. A dialect is a folder and one line here."""

from importlib import import_module

from starlette.types import Scope

from ostro.server.dialects.dialect import OLLAMA, OPENAI, Dialect

FOLDERS = (
    "chat",
    "responses",
    "messages",
    # After chat, whose path for a named model would match as well.
    "completions",
)
"""Their routes are registered in this order."""
DIALECTS: tuple[Dialect, ...] = tuple(
    import_module(f"ostro.server.dialects.{name}.framing").DIALECT for name in FOLDERS
)


def dialect_of(scope: Scope) -> Dialect:
    """The dialect of a request, served or not."""
    for dialect in (*DIALECTS, OLLAMA):
        if dialect.claims(scope):
            return dialect
    return OPENAI
