"""/v1/embeddings; /v1/rerank, as Cohere and Jina have it; and /v1/score, as vLLM has it: requests and responses."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ostro.schemas.fields import MAX_CHARACTERS, MAX_PROMPTS, Prompts, Text
from ostro.schemas.wire import RequestModel, WireModel, left_out, refusal, shape


class EmbeddingRequest(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = "default"
    # Always a list here: a lone text is a list of one.
    input: Prompts
    """Up to 2048 texts."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Shorten vectors to this many numbers; for models that say in config.json that they were trained for it."""
    prompt_name: str | None = None
    """Which of the model's own prompts to put before texts, such as "query"; the default is the model's."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of a text, an encoder's first or a decoder's last; -1 keeps what fits in the context."""


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

    @classmethod
    def of(cls, request: EmbeddingRequest, vectors: Sequence[list[float]], *, num_tokens: int, model: str) -> Self:
        """`vectors` has one per input, in order."""
        return cls(
            data=[Embedding(index=index, embedding=_encoded(request, vector)) for index, vector in enumerate(vectors)],
            model=model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )


def _encoded(request: EmbeddingRequest, vector: list[float]) -> list[float] | str:
    if request.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
