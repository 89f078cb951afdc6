"""What concerns all replicas: metrics, and what the admin does. One answer is made of all of theirs."""

import json
from collections.abc import Awaitable, Sequence
from http import HTTPStatus
from typing import Protocol

from starlette.responses import Response

from ostro.errors import Unavailable
from ostro.ray.call import Call
from ostro.ray.exposition import merged
from ostro.ray.replica import WholeAnswer
from ostro.server.admission.auth import ADMIN_PREFIX, METRICS_PATH
from ostro.server.telemetry.metrics import CONTENT_TYPE

NONE_CAME = "No replica has taken the request in time. Try again in a moment."


class AllEngines(Protocol):
    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """Exceptions raised if a replica has died or none is available."""

    def ask_all(self, call: Call) -> Awaitable[Sequence[WholeAnswer | BaseException]]: ...


def concerns_all(method: str, path: str) -> bool:
    return method in ("GET", "POST") and (path == METRICS_PATH or path.startswith(ADMIN_PREFIX + "/"))


async def answer_of_all(engines: AllEngines, call: Call) -> Response:
    """All replicas' answers merged into one, or the first refusal."""
    try:
        answers = [answer for answer in await engines.ask_all(call) if isinstance(answer, WholeAnswer)]
    except TimeoutError:
        raise Unavailable(NONE_CAME) from None
    except engines.faults as fault:
        raise Unavailable(NONE_CAME) from fault
    if not answers:
        raise Unavailable(NONE_CAME)
    for answer in answers:
        if answer.status != HTTPStatus.OK:
            return _copied(answer)
    if call.path == METRICS_PATH:
        body, kind = merged({each.replica: each.body.decode() for each in answers}), CONTENT_TYPE
    else:
        told = {"replicas": {each.replica: json.loads(each.body) for each in answers}}
        body, kind = json.dumps(told).encode(), "application/json"
    response = Response(body, media_type=kind)
    # Keeps the CORS headers.
    response.raw_headers += [pair for pair in answers[0].headers if pair[0].startswith((b"access-control-", b"vary"))]
    return response


def _copied(answer: WholeAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = [(name, value) for name, value in answer.headers if name != b"x-request-id"]
    return response
