"""The OpenAI API's objects as pydantic models, at the edge only: `parse` lets a request in, and inside it is ours."""

from ostro.schemas.batch import BatchError, BatchRequest, BatchResponse, BatchResult
from ostro.schemas.chat import (
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    Message,
    TopLogprob,
)
from ostro.schemas.chunks import ChatCompletionChunk, CompletionChunk
from ostro.schemas.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from ostro.schemas.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from ostro.schemas.errors import ErrorBody, ErrorDetail
from ostro.schemas.generation import (
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from ostro.schemas.hrm import SolveRequest, SolveResponse
from ostro.schemas.models import Alive, Health, ModelCard, ModelList, ModelStats, Readiness, Stats, Version
from ostro.schemas.native import (
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    GenerateUsageEvent,
    LoglikelihoodRequest,
    LoglikelihoodResponse,
    PseudoLoglikelihoodResponse,
    TokenCounts,
)
from ostro.schemas.tokenizer import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from ostro.schemas.wire import RequestModel, WireModel, bad_request, parse

__all__ = [
    "Alive",
    "BatchError",
    "BatchRequest",
    "BatchResponse",
    "BatchResult",
    "ChatChoice",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatLogprobs",
    "ChatMessage",
    "ChatTokenLogprob",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionLogprobs",
    "CompletionRequest",
    "CompletionResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "Embedding",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "EmbeddingUsage",
    "ErrorBody",
    "ErrorDetail",
    "FinishReason",
    "GenerateEvent",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateUsageEvent",
    "GenerationRequest",
    "Health",
    "LoglikelihoodRequest",
    "LoglikelihoodResponse",
    "Message",
    "ModelCard",
    "ModelList",
    "ModelStats",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "PseudoLoglikelihoodResponse",
    "Readiness",
    "RequestModel",
    "SolveRequest",
    "SolveResponse",
    "Stats",
    "StreamOptions",
    "TokenCounts",
    "TokenizeRequest",
    "TokenizeResponse",
    "TokenizerInfo",
    "TopLogprob",
    "Usage",
    "Version",
    "WireModel",
    "bad_request",
    "parse",
]
