"""The body of every error response."""

from typing import Self

from ostro.errors import OstroError
from ostro.schemas.wire import WireModel


class ErrorDetail(WireModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(WireModel):
    error: ErrorDetail

    @classmethod
    def of(cls, error: OstroError) -> Self:
        detail = ErrorDetail(message=error.public, type=error.openai_type, param=error.param, code=error.openai_code)
        return cls(error=detail)
