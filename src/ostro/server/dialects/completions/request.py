"""Translates a completion request into requests to the engine, one per prompt. Knows no sockets."""

from contextlib import nullcontext

from ostro.engine.request import Request
from ostro.sampling_params import SamplingParams
from ostro.schemas.completions import CompletionRequest
from ostro.server.models.served import Model


async def prepared(request: CompletionRequest, params: SamplingParams, model: Model) -> list[Request]:
    """`params` are the request's own with the operator's defaults."""
    source = request.format_source
    with nullcontext() if source is None else source.named_in_errors():
        return await model.service.prepare_all(
            request.prompt, params, cache_salt=request.cache_salt, priority=request.priority, adapter=model.adapter
        )
