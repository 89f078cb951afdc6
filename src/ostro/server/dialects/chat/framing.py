"""Chat completions among the dialects: OpenAI's conventions."""

from typing import Final

from ostro.server.dialects.dialect import Dialect

DIALECT: Final = Dialect("/v1/chat/completions")
