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


def _text_of(value: object) -> object:
    """Unwraps {"text": …}, another form of a document."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | dict) else value


_TEXT_SCHEMA = {"type": "string", "maxLength": MAX_CHARACTERS}
_LIST_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT_SCHEMA}
_Document = Annotated[Text, BeforeValidator(_text_of)]
_Documents = Annotated[
    list[_Document],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    shape(f"must be a list of 1 to {MAX_PROMPTS} texts, each of at most {MAX_CHARACTERS} characters"),
    WithJsonSchema(_LIST_SCHEMA),
]
Texts = Annotated[
    list[_Document],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    BeforeValidator(_listed),
    shape(f"must be a text, or a list of 1 to {MAX_PROMPTS} texts, each of at most {MAX_CHARACTERS} characters"),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, _LIST_SCHEMA]}),
]


class RerankRequest(RequestModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = "default"
    query: Text
    documents: _Documents
    """Up to 2048 texts, or objects with a `text`."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """How many of the best to return; the default is all."""
    return_documents: bool = False
    """Whether results repeat the documents' texts."""
    truncate_prompt_tokens: int | None = None
    """Shorten each pair, or each text if they are embedded, to this many tokens; -1 to what fits in the context."""


class RankedText(WireModel):
    text: str


class RerankResult(WireModel):
    index: int
    """The document's place in the request."""
    relevance_score: float
    document: RankedText | None = left_out()


class RerankResponse(WireModel):
    id: str
    model: str
    results: list[RerankResult]
    """Best first."""
    usage: EmbeddingUsage


class ScoreRequest(RequestModel):
    """One first text and any number of second ones, or as many of one as of the other."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str = "default"
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """Another name of `text_1`."""
    documents: Texts | None = None
    """Another name of `text_2`."""
    encoding_format: Literal["float"] = "float"
    truncate_prompt_tokens: int | None = None
    """Shorten each pair, or each text if they are embedded, to this many tokens; -1 to what fits in the context."""

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            given = [each for each in (name, other) if getattr(self, each) is not None]
            if len(given) != 1:
                complaint = f"is required, under this name or as {other}" if not given else f"and {other} are the same"
                raise refusal(name, complaint)
        first, second = self.sides
        if len(first) not in (1, len(second)):
            raise refusal("text_1", f"must be one text or as many as the others, got {len(first)} and {len(second)}")
        return self

    @property
    def fields(self) -> tuple[str, str]:
        """The names of both sides that the request uses."""
        return "text_1" if self.queries is None else "queries", "text_2" if self.documents is None else "documents"

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        return self.text_1 or self.queries or [], self.text_2 or self.documents or []

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = self.sides
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class ScoredPair(WireModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(WireModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoredPair]
    """One per pair, in order."""
    usage: EmbeddingUsage
