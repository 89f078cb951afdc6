"""The OpenAI API's objects as pydantic models, at the edge only: `parse` lets a request in, and inside it is ours."""

from ostro.server.schemas.batch import BatchError, BatchRequest, BatchResponse, BatchResult
from ostro.server.schemas.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Message,
    TopLogprob,
)
from ostro.server.schemas.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from ostro.server.schemas.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from ostro.server.schemas.errors import ErrorBody, ErrorDetail
from ostro.server.schemas.generation import (
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from ostro.server.schemas.wire import RequestModel, WireModel, bad_request, parse

__all__ = [
    "BatchError",
    "BatchRequest",
    "BatchResponse",
    "BatchResult",
    "ChatChoice",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionResponse",
    "Embedding",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "EmbeddingUsage",
    "ErrorBody",
    "ErrorDetail",
    "GenerationRequest",
    "Message",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "RequestModel",
    "StreamOptions",
    "TopLogprob",
    "Usage",
    "WireModel",
    "bad_request",
    "parse",
]
