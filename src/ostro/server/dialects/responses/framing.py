"""The Responses API among the dialects: OpenAI's errors, but streams with typed events."""

from typing import Final

from ostro.errors import OstroError
from ostro.server.dialects.dialect import Dialect
from ostro.server.http.sse import typed_event


class ResponsesDialect(Dialect):
    done = b""

    def failed(self, error: OstroError) -> bytes:
        """An error outside the response's own, numbered events."""
        return typed_event("error", {"code": error.openai_code, "message": error.public, "param": error.param})


DIALECT: Final = ResponsesDialect("/v1/responses")
