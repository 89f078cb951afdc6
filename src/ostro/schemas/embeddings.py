"""POST /v1/embeddings: the request and its answer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ostro.schemas.prompts import Prompts
from ostro.schemas.wire import RequestModel, WireModel


class EmbeddingRequest(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = "default"
    # Always a list here: a lone text is a list of one.
    input: Prompts
    """Up to 2048 of them."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """As many as the model has: vectors are not shortened."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of a text's last tokens, at least 1; -1 keeps what the context has room for."""


class Embedding(WireModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or the base64 of their little-endian float32."""


class EmbeddingUsage(WireModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(WireModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
