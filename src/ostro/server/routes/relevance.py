"""POST /v1/rerank and /v1/score."""

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.frontend.outputs import Completion, ranked
from ostro.frontend.relevance import Pair
from ostro.schemas.embeddings import (
    EmbeddingUsage,
    RankedText,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoredPair,
    ScoreRequest,
    ScoreResponse,
)
from ostro.schemas.wire import WireModel
from ostro.server.api import Api
from ostro.server.api_docs.document import described
from ostro.server.dialects.writing import new_id
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["embed"])

    @routes.post("/v1/rerank", **described(RerankResponse, request=RerankRequest))
    @routes.post("/v2/rerank", include_in_schema=False)
    @routes.post("/rerank", include_in_schema=False)
    async def rerank(http: Request) -> Response:
        """Documents in order of their relevance to a query, from a reranker or an embedding model."""
        request = await api.read(RerankRequest, http)
        return Answer(api, http, _rerank_job(request))

    @routes.post("/v1/score", **described(ScoreResponse, request=ScoreRequest))
    @routes.post("/score", include_in_schema=False)
    async def score(http: Request) -> Response:
        """How relevant the second text of each pair is to the first."""
        request = await api.read(ScoreRequest, http)
        return Answer(api, http, _score_job(request))

    return routes


def _rerank_job(request: RerankRequest) -> Job:
    pairs = [(request.query, document) for document in request.documents]

    async def prepare(model: Model) -> list[EngineRequest]:
        return await model.service.prepare_relevance(
            pairs,
            fields=("query", "documents"),
            adapter=model.adapter,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        results = [
            RerankResult(
                index=each.index,
                relevance_score=each.score,
                document=RankedText(text=request.documents[each.index]) if request.return_documents else None,
            )
            for each in ranked(model.service.relevance_scores(pairs, completions), request.top_n)
        ]
        return RerankResponse(id=new_id("rerank-"), model=model.name, results=results, usage=_usage(model, completions))

    return Job(request.model, prepare, respond)


def _score_job(request: ScoreRequest) -> Job:
    pairs: Sequence[Pair] = request.pairs

    async def prepare(model: Model) -> list[EngineRequest]:
        return await model.service.prepare_relevance(
            pairs,
            fields=request.fields,
            adapter=model.adapter,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
        )

    def respond(model: Model, completions: list[Completion]) -> WireModel:
        scores = model.service.relevance_scores(pairs, completions)
        return ScoreResponse(
            id=new_id("score-"),
            created=int(time.time()),
            model=model.name,
            data=[ScoredPair(index=index, score=score) for index, score in enumerate(scores)],
            usage=_usage(model, completions),
        )

    return Job(request.model, prepare, respond)


def _usage(model: Model, completions: Sequence[Completion]) -> EmbeddingUsage:
    tokens = model.service.tokens_read(completions)
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
