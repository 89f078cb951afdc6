"""Every endpoint, described once: its path, its request and its response. Knows no connections.

Each function builds a call from a method's arguments; `Client` and `AsyncClient` have a method for each.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Generic, TypeVar, Unpack
from urllib.parse import quote

from ostro.client.failures import error_of
from ostro.client.gathering import (
    ChatGathering,
    CompletionGathering,
    Gathering,
    GenerateGathering,
    read,
)
from ostro.client.options import (
    ChatOptions,
    CompletionOptions,
    EmbeddingOptions,
    GenerateOptions,
    Messages,
    ModelOption,
    Prompts,
    RelevanceOptions,
    RerankOptions,
    ScoreOptions,
    TokenizeOptions,
    Words,
)
from ostro.errors import BadRequest, OstroError
from ostro.schemas.chat import ChatCompletionChunk, ChatCompletionResponse
from ostro.schemas.completions import CompletionChunk, CompletionResponse
from ostro.schemas.embeddings import EmbeddingResponse, RerankResponse, ScoreResponse
from ostro.schemas.models import Alive, ModelCard, ModelList, ModelStats, Readiness, Stats, Version
from ostro.schemas.native import (
    GenerateEvent,
    GenerateResponse,
    LoglikelihoodResponse,
    PseudoLoglikelihoodResponse,
    SolveResponse,
)
from ostro.schemas.tokenizer import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from ostro.schemas.wire import WireModel

T = TypeVar("T")
Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")
Model = TypeVar("Model", bound=WireModel)
Body = Mapping[str, object]
Refusal = Callable[[int, Mapping[str, str], bytes], OstroError]

_EVENTS = "text/event-stream"

Method = TypeVar("Method", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Question:
    """A request to send."""

    method: str
    path: str
    content: bytes = b""
    accept: str = "application/json"
    also: frozenset[int] = frozenset()
    """Statuses other than 200 that carry a regular answer."""
    refusal: Refusal = error_of
    """Translates any other status into an error, from status, headers and body."""

    @property
    def for_admins(self) -> bool:
        return self.path.startswith("/admin/")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    question: Question
    read: Callable[[bytes], T]
    """Parses the response body."""


@dataclass(frozen=True, slots=True)
class StreamCall(Generic[Chunk, Whole]):
    question: Question
    gathering: Callable[[], Gathering[Chunk, Whole]]


# --- text -----------------------------------------------------------------------------------------------------------


def chat(messages: Messages, **options: Unpack[ChatOptions]) -> Call[ChatCompletionResponse]:
    """The next message of a conversation; a plain string is a single user message."""
    return _post("/v1/chat/completions", {"messages": _conversation(messages), **options}, ChatCompletionResponse)


def stream_chat(
    messages: Messages, **options: Unpack[ChatOptions]
) -> StreamCall[ChatCompletionChunk, ChatCompletionResponse]:
    """The same, streamed."""
    return _stream("/v1/chat/completions", {"messages": _conversation(messages), **options, **_STREAMED}, ChatGathering)


def complete(prompt: Prompts, **options: Unpack[CompletionOptions]) -> Call[CompletionResponse]:
    """Continuations of one or several prompts."""
    return _post("/v1/completions", {"prompt": prompt, **options}, CompletionResponse)


def stream_complete(
    prompt: Prompts, **options: Unpack[CompletionOptions]
) -> StreamCall[CompletionChunk, CompletionResponse]:
    """The same, streamed."""
    return _stream("/v1/completions", {"prompt": prompt, **options, **_STREAMED}, CompletionGathering)


def generate(prompts: Prompts, **options: Unpack[GenerateOptions]) -> Call[GenerateResponse]:
    """One text per prompt, without choices and log-probabilities."""
    return _post("/generate", {"prompts": prompts, **options}, GenerateResponse)


def stream_generate(
    prompts: Prompts, **options: Unpack[GenerateOptions]
) -> StreamCall[GenerateEvent, GenerateResponse]:
    """The same, streamed."""
    return _stream("/generate_stream", {"prompts": prompts, **options}, GenerateGathering)


# --- scores, vectors, tokens ----------------------------------------------------------------------------------------


def loglikelihood(
    prompts: Prompts, continuations: Prompts, **options: Unpack[ScoreOptions]
) -> Call[LoglikelihoodResponse]:
    """How likely the model is to continue each prompt with the given text."""
    return _post("/loglikelihood", _pairs(prompts, continuations, options), LoglikelihoodResponse)


def pseudo_loglikelihood(
    prompts: Prompts, continuations: Prompts, **options: Unpack[ScoreOptions]
) -> Call[PseudoLoglikelihoodResponse]:
    """For bidirectional models: scores each continuation in one pass."""
    return _post("/pseudo_loglikelihood", _pairs(prompts, continuations, options), PseudoLoglikelihoodResponse)


def solve(
    inputs: list[list[int]], puzzle_ids: list[int] | None = None, **options: Unpack[ModelOption]
) -> Call[SolveResponse]:
    """A token for every position of each puzzle at once, from an HRM in the upstream dialect."""
    return _post("/hrm/solve", {"inputs": inputs, "puzzle_ids": puzzle_ids, **options}, SolveResponse)


def embed(input: Prompts, **options: Unpack[EmbeddingOptions]) -> Call[EmbeddingResponse]:
    """One vector per text, from an embedding model."""
    return _post("/v1/embeddings", {"input": input, **options}, EmbeddingResponse)


def rerank(query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> Call[RerankResponse]:
    """Documents in order of their relevance to a query, from a cross-encoder or an embedding model."""
    return _post("/v1/rerank", {"query": query, "documents": list(documents), **options}, RerankResponse)


def score(text_1: Words, text_2: Words, **options: Unpack[RelevanceOptions]) -> Call[ScoreResponse]:
    """How relevant the second text of each pair is to the first; one first text may go with many."""
    return _post("/v1/score", {"text_1": text_1, "text_2": text_2, **options}, ScoreResponse)


def tokenize(prompt: Messages, **options: Unpack[TokenizeOptions]) -> Call[TokenizeResponse]:
    """The token ids of a text, or of a conversation rendered with the model's chat template."""
    name = "prompt" if isinstance(prompt, str) else "messages"
    return _post("/tokenize", {name: prompt, **options}, TokenizeResponse)


def detokenize(tokens: list[int], **options: Unpack[ModelOption]) -> Call[DetokenizeResponse]:
    """The text of token ids, including special tokens."""
    return _post("/detokenize", {"tokens": tokens, **options}, DetokenizeResponse)


def tokenizer_info(model: str | None = None) -> Call[TokenizerInfo]:
    """What a client needs to count and truncate tokens as the server does."""
    asked = "" if model is None else f"?model={quote(model, safe='')}"
    return _get(f"/tokenizer_info{asked}", TokenizerInfo)


# --- models and the server ------------------------------------------------------------------------------------------


def models() -> Call[ModelList]:
    """All models: those loaded, those loading, and those that can be loaded on request."""
    return _get("/v1/models", ModelList)


def model(name: str) -> Call[ModelCard]:
    """One model."""
    return _get(f"/v1/models/{quote(name)}", ModelCard)


def version() -> Call[Version]:
    return _get("/version", Version)


def load(model: str) -> Call[ModelStats]:
    """Loads a model and waits for it; may evict others. Requires the admin key, like the next four."""
    return _post(f"/admin/load/{quote(model)}", None, ModelStats)


def unload(model: str) -> Call[ModelStats]:
    """Unloads a model once its requests have ended."""
    return _post(f"/admin/unload/{quote(model)}", None, ModelStats)


def pin(model: str) -> Call[ModelStats]:
    """Loads a model and keeps it loaded."""
    return _post(f"/admin/pin/{quote(model)}", None, ModelStats)


def unpin(model: str) -> Call[ModelStats]:
    """Allows a model to be evicted again."""
    return _post(f"/admin/unpin/{quote(model)}", None, ModelStats)


def stats() -> Call[Stats]:
    """All models, with their memory use and activity."""
    return _get("/admin/stats", Stats)


def alive() -> Call[Alive]:
    """Also succeeds while /healthz waits for the model: the server is up."""
    return Call(Question("GET", "/healthz", also=frozenset({503})), partial(read, Alive))


def readiness() -> Call[Readiness]:
    """Also succeeds while the server is not ready: the answer says why."""
    return Call(Question("GET", "/readyz", also=frozenset({503})), partial(read, Readiness))


# --- helpers --------------------------------------------------------------------------------------------------------

_STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True}}


def as_json(body: Body) -> bytes:
    """Raises BadRequest for anything JSON cannot express."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"The request cannot be written as JSON: {error}.") from error


def _get(path: str, schema: type[Model]) -> Call[Model]:
    return Call(Question("GET", path), partial(read, schema))


def _post(path: str, body: Body | None, schema: type[Model]) -> Call[Model]:
    return Call(Question("POST", path, b"" if body is None else as_json(body)), partial(read, schema))


def _stream(path: str, body: Body, gathering: Callable[[], Gathering[Chunk, Whole]]) -> StreamCall[Chunk, Whole]:
    return StreamCall(Question("POST", path, as_json(body), accept=_EVENTS), gathering)


def _conversation(messages: Messages) -> object:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _pairs(prompts: Prompts, continuations: Prompts, options: ScoreOptions) -> Body:
    return {"prompts": prompts, "continuations": continuations, **options}


def documented(method: Method, endpoint: Callable[..., object]) -> Method:
    """Gives a client's method the endpoint's name, docstring and parameters, but not its return type."""
    update_wrapper(method, endpoint)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [this, *inspect.signature(endpoint).parameters.values()]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method
