"""POST /prefill: computes prompts, and leaves them to the engines of other servers."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import NotAllowed
from ostro.outputs import Completion
from ostro.sampling_params import SamplingParams
from ostro.schemas import PrefillRequest, PrefillResponse, WireModel
from ostro.server.api import Api
from ostro.server.documentation import described
from ostro.server.generation import Answer, Job
from ostro.server.models import Model

# No request can do without a token.
_PARAMS = SamplingParams(max_tokens=1, temperature=0)


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/prefill", **described(PrefillResponse, request=PrefillRequest))
    async def prefill(http: Request) -> Response:
        """Computes prompts and leaves their keys and values to other servers. Needs `--role prefill`."""
        request = await api.read(PrefillRequest, http)
        if not api.options.prefills:
            raise NotAllowed("This server computes no prompts for others. Start it with --role prefill.")
        found: list[int] = []

        async def prepare(model: Model) -> list[EngineRequest]:
            return await model.service.prepare_all(request.prompts, _PARAMS, adapter=model.adapter)

        async def offer(model: Model, requests: list[EngineRequest]) -> None:
            found.extend([await model.service.offer(each) for each in requests])

        def respond(model: Model, completions: list[Completion]) -> WireModel:
            return PrefillResponse(num_tokens=found)

        return Answer(api, http, Job(request.model, prepare, respond, finish=offer))

    return routes
