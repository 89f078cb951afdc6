"""The last event of a stream, in any dialect, whose writer has died. Knows paths."""

from starlette.types import Scope

from ostro.errors import OstroError
from ostro.server.dialects.messages.framing import error_event, speaks_messages
from ostro.server.http.sse import OPENAI, typed_event

RESPONSES = "/v1/responses"


def last_event(scope: Scope, error: OstroError) -> bytes:
    if speaks_messages(scope):
        return error_event(error, None)
    if scope["path"].startswith(RESPONSES):
        return response_error(error)
    return OPENAI.failed(error)


def response_error(error: OstroError) -> bytes:
    """For an error outside the response's own, numbered events."""
    return typed_event("error", {"code": error.openai_code, "message": error.public, "param": error.param})
