"""The lines of OpenAI's batch files: requests in, results out."""

from typing import Literal

from pydantic import Field, SerializeAsAny

from ostro.schemas.wire import RequestModel, WireModel


class BatchRequest(RequestModel):
    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    body: dict[str, object]


class BatchResponse(WireModel):
    """The endpoint's response, which may be an error."""

    status_code: int
    request_id: str
    body: SerializeAsAny[WireModel]


class BatchError(WireModel):
    """Why a line did not reach an endpoint."""

    code: str
    message: str


class BatchResult(WireModel):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200
