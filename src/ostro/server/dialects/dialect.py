"""What a dialect says about itself: its paths, its errors, and how its streams end.

The base class has OpenAI's conventions. Knows errors and wire objects; knows no routes and no engine.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

from starlette.types import Scope

from ostro.errors import OstroError
from ostro.schemas.models import ModelCard, ModelList
from ostro.schemas.wire import ErrorBody, ErrorText, WireModel
from ostro.server.http.sse import PING, event

MODELS_PATH = "/v1/models"
"""Path at which every dialect lists models."""


class Dialect:
    """OpenAI's conventions; other dialects override what differs. Also the framing of its streams (`http.sse`)."""

    ping: ClassVar[bytes] = PING
    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    error_schema: ClassVar[type[WireModel]] = ErrorBody
    id_headers: ClassVar[tuple[bytes, ...]] = (b"x-request-id",)
    """Response headers that carry the request's id."""

    def __init__(self, path: str, *, operation: str = "chat") -> None:
        """`path` is where it generates; below it are its other endpoints. `operation` names this in traces."""
        self.path = path
        self.operation = operation
        self._below = path + "/"

    def claims(self, scope: Scope) -> bool:
        """Whether a request is in this dialect."""
        path: str = scope["path"]
        return path.startswith(self._below) or path == self.path

    def status(self, status: int) -> int:
        """The dialect's own HTTP status for an error."""
        return status

    def error_body(self, error: OstroError, request_id: str | None) -> WireModel:
        return ErrorBody.of(error)

    def failed(self, error: OstroError) -> bytes:
        """The end of a stream that failed."""
        return event(ErrorBody.of(error).model_dump_json().encode()) + self.done

    def model(self, card: ModelCard) -> WireModel:
        return card

    def model_list(self, cards: Sequence[ModelCard]) -> WireModel:
        return ModelList(data=list(cards))


class Ollama(Dialect):
    """Ollama's errors: a text. Nothing else of it is spoken; its clients are told so in words that they show."""

    error_schema = ErrorText

    def error_body(self, error: OstroError, request_id: str | None) -> WireModel:
        return ErrorText.of(error)


OPENAI: Final = Dialect("")
"""For paths that no dialect claims."""
OLLAMA: Final = Ollama("/api")
