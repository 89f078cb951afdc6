"""POST /generate, POST /generate_stream, POST /loglikelihood, POST /pseudo_loglikelihood."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.frontend.outputs import Completion, Delta, score
from ostro.sampling_defaults import SamplingDefaults
from ostro.schemas import (
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    GenerateUsageEvent,
    LoglikelihoodRequest,
    LoglikelihoodResponse,
    PseudoLoglikelihoodResponse,
    TokenCounts,
    WireModel,
)
from ostro.server.api import Api, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.dialect import OPENAI
from ostro.server.dialects.openai import finish_reason, finite, usage
from ostro.server.generation import Answer, Job
from ostro.server.http.sse import event
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/generate", **described(GenerateResponse, request=GenerateRequest))
    async def generate(http: Request) -> Response:
        """A continuation of each prompt."""
        return await _generate(api, http, stream=False)

    @routes.post("/generate_stream", **described(GenerateEvent, request=GenerateRequest, events=GenerateEvent))
    async def generate_stream(http: Request) -> Response:
        """A continuation of each prompt, streamed."""
        return await _generate(api, http, stream=True)

    @routes.post("/loglikelihood", **described(LoglikelihoodResponse, request=LoglikelihoodRequest))
    async def loglikelihood(http: Request) -> Response:
        """How likely the model is to continue each prompt in the given way, token by token."""
        request = await api.read(LoglikelihoodRequest, http)
        return Answer(api, http, _scoring(request))

    @routes.post("/pseudo_loglikelihood", **described(PseudoLoglikelihoodResponse, request=LoglikelihoodRequest))
    async def pseudo_loglikelihood(http: Request) -> Response:
        """For bidirectional models: the pseudo-log-likelihood of each continuation, in one pass over it."""
        request = await api.read(LoglikelihoodRequest, http)
        return Answer(api, http, _scoring(request, one_pass=True))

    return routes


# --- text -----------------------------------------------------------------------------------------------------------


async def _generate(api: Api, http: Request, *, stream: bool) -> Response:
    request = await api.read(GenerateRequest, http)
    record_of(http).stream = stream
    asked, source = api.options.params(request), request.format_source

    async def prepare(model: Model) -> list[EngineRequest]:
        own = model.service.sampling_defaults or SamplingDefaults()
        params = own.over(request.fallback).fill(asked)
        with nullcontext() if source is None else source.named_in_errors():
            return await model.service.prepare_all(
                request.prompts, params, cache_salt=request.cache_salt, adapter=model.adapter
            )

    writer = partial(_TextEventWriter, strict=api.options.openai_strict)
    return Answer(api, http, Job(request.model, prepare, _texts, writer if stream else None))


def _texts(model: Model, completions: list[Completion]) -> WireModel:
    for completion in completions:
        finish_reason(completion.choices[0])
    return GenerateResponse(completions=[each.text for each in completions], usage=_counts(completions))


def _counts(completions: Sequence[Completion]) -> TokenCounts:
    counted = usage(completions)
    return TokenCounts(
        prompt_tokens=counted.prompt_tokens,
        completion_tokens=counted.completion_tokens,
        total_tokens=counted.total_tokens,
    )


class _TextEventWriter:
    id = None
    framing: Final = OPENAI

    def __init__(self, model: Model, completions: list[Completion], *, strict: bool) -> None:
        self._completions = completions
        self._strict = strict

    def start(self) -> bytes:
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        return b"".join(self._event(number, delta) for delta in deltas if delta.text or delta.finish_reason)

    def end(self) -> bytes:
        return event(GenerateUsageEvent(usage=_counts(self._completions)).model_dump_json().encode())

    def _event(self, number: int, delta: Delta) -> bytes:
        choice = self._completions[number].choices[0]
        reason = None if delta.finish_reason is None else finish_reason(choice, strict=self._strict)
        told = GenerateEvent(index=number, text=delta.text, finish_reason=reason)
        return event(told.model_dump_json().encode())


# --- scores ---------------------------------------------------------------------------------------------------------


def _scoring(request: LoglikelihoodRequest, *, one_pass: bool = False) -> Job:
    async def prepare(model: Model) -> list[EngineRequest]:
        return await model.service.prepare_scoring(
            list(zip(request.prompts, request.continuations, strict=True)),
            one_pass=one_pass,
            cache_salt=request.cache_salt,
            adapter=model.adapter,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        scores = [score(completion) for completion in completions]
        sums, counts = [finite(each.logprob) for each in scores], [each.num_tokens for each in scores]
        if one_pass:
            return PseudoLoglikelihoodResponse(pll=sums, num_tokens=counts)
        return LoglikelihoodResponse(ll=sums, is_greedy=[each.is_greedy for each in scores], num_tokens=counts)

    return Job(request.model, prepare, respond)
