"""POST /hrm/solve."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.frontend.outputs import Completion, solution
from ostro.schemas import SolveRequest, SolveResponse, WireModel
from ostro.server.api import Api
from ostro.server.api_docs.document import described
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/hrm/solve", **described(SolveResponse, request=SolveRequest))
    async def solve(http: Request) -> Response:
        """A token for every position of each puzzle at once, from an HRM in upstream's dialect."""
        request = await api.read(SolveRequest, http)
        return Answer(api, http, _job(request))

    return routes


def _job(request: SolveRequest) -> Job:
    async def prepare(model: Model) -> list[EngineRequest]:
        numbers = request.puzzle_ids or [0] * len(request.inputs)
        return await model.service.prepare_solving(list(zip(request.inputs, numbers, strict=True)))

    return Job(request.model, prepare, _answers)


def _answers(model: Model, completions: list[Completion]) -> WireModel:
    solved = [solution(completion) for completion in completions]
    return SolveResponse(
        predictions=[each.predictions for each in solved],
        steps=[each.steps for each in solved],
        halted=[each.halted for each in solved],
        q_halt=[each.q_halt for each in solved],
        q_continue=[each.q_continue for each in solved],
    )
