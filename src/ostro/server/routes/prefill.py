"""POST /prefill: computes prompts, and shares them with the engines of other servers."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ostro.engine.request import Request as EngineRequest
from ostro.errors import NotAllowed
from ostro.frontend.outputs import Completion
from ostro.sampling_params import SamplingParams
from ostro.schemas import PrefillRequest, PrefillResponse, WireModel
from ostro.server.api import Api
from ostro.server.api_docs.document import described
from ostro.server.generation import Answer, Job
from ostro.server.models.served import Model
from ostro.server.models.service import Generation

# No request can do without a token.
_PARAMS = SamplingParams(max_tokens=1, temperature=0)


def router(api: Api) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/prefill", **described(PrefillResponse, request=PrefillRequest))
    async def prefill(http: Request) -> Response:
        """Computes prompts and shares their keys and values with other servers. Needs `--role prefill`."""
        request = await api.read(PrefillRequest, http)
        found: list[int] = []

        async def prepare(model: Model) -> list[EngineRequest]:
            prepared = await model.service.prepare_all(request.prompts, _PARAMS, adapter=model.adapter)
            if not api.options.prefills:
                raise NotAllowed("This server computes no prompts for others. Start it with --role prefill.")
            return [replace(each, shares_prompt=True) for each in prepared]

        async def offered(generations: Sequence[Generation]) -> None:
            found.extend([await each.offered() for each in generations])

        def respond(model: Model, completions: list[Completion]) -> WireModel:
            return PrefillResponse(num_tokens=found)

        return Answer(api, http, Job(request.model, prepare, respond, finish=offered))

    return routes
