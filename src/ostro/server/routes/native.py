"""POST /generate, /generate_stream, /loglikelihood, /pseudo_loglikelihood, /hrm/solve and /prefill."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import NotAllowed
from ostro.frontend.outputs import Completion, Delta, score, solution
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.schemas.native import (
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    GenerateUsageEvent,
    LoglikelihoodRequest,
    LoglikelihoodResponse,
    PrefillRequest,
    PrefillResponse,
    PseudoLoglikelihoodResponse,
    SolveRequest,
    SolveResponse,
    TokenCounts,
)
from ostro.schemas.wire import WireModel
from ostro.server.api import Api, record_of
from ostro.server.api_docs.document import described
from ostro.server.dialects.dialect import OPENAI
from ostro.server.dialects.openai import finish_reason, finite, usage
from ostro.server.generation import Answer, Job
from ostro.server.http.sse import event
from ostro.server.models.served import Model
from ostro.server.models.service import Generation

# The engine needs at least one token per request.
_PREFILL_PARAMS = SamplingParams(max_tokens=1, temperature=0)


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

    @routes.post("/hrm/solve", **described(SolveResponse, request=SolveRequest))
    async def solve(http: Request) -> Response:
        """A token for every position of each puzzle at once, from an HRM in upstream's dialect."""
        request = await api.read(SolveRequest, http)
        return Answer(api, http, _solving(request))

    @routes.post("/prefill", **described(PrefillResponse, request=PrefillRequest))
    async def prefill(http: Request) -> Response:
        """Computes prompts and shares their KV cache with other servers. Needs `--role prefill`."""
        request = await api.read(PrefillRequest, http)
        return Answer(api, http, _prefilling(api, request))

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


# --- puzzles --------------------------------------------------------------------------------------------------------


def _solving(request: SolveRequest) -> Job:
    async def prepare(model: Model) -> list[EngineRequest]:
        numbers = request.puzzle_ids or [0] * len(request.inputs)
        return await model.service.prepare_solving(list(zip(request.inputs, numbers, strict=True)))

    return Job(request.model, prepare, _solutions)


def _solutions(model: Model, completions: list[Completion]) -> WireModel:
    solved = [solution(completion) for completion in completions]
    return SolveResponse(
        predictions=[each.predictions for each in solved],
        steps=[each.steps for each in solved],
        halted=[each.halted for each in solved],
        q_halt=[each.q_halt for each in solved],
        q_continue=[each.q_continue for each in solved],
    )


# --- prompts for other servers --------------------------------------------------------------------------------------


def _prefilling(api: Api, request: PrefillRequest) -> Job:
    found: list[int] = []

    async def prepare(model: Model) -> list[EngineRequest]:
        prepared = await model.service.prepare_all(request.prompts, _PREFILL_PARAMS, adapter=model.adapter)
        if not api.options.prefills:
            raise NotAllowed("This server does not compute prompts for others. Start it with --role prefill.")
        return [replace(each, shares_prompt=True) for each in prepared]

    async def offered(generations: Sequence[Generation]) -> None:
        found.extend([await each.offered() for each in generations])

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        return PrefillResponse(num_tokens=found)

    return Job(request.model, prepare, respond, finish=offered)
