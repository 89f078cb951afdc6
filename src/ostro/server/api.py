"""What every endpoint is given: the model, the gate before it, the limits; and how it answers."""

import reprlib
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from ostro.errors import ModelNotFound
from ostro.server.body import BodyLimits
from ostro.server.limits import Gate
from ostro.server.logging import RequestRecord
from ostro.server.schemas import WireModel
from ostro.server.service import ModelService


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    body: BodyLimits = field(default_factory=BodyLimits)
    ping_seconds: float = 15.0
    """After so long a silence a stream says that it is alive: proxies cut off what is silent for a minute."""
    served_names: tuple[str, ...] = ()
    """What clients may call the model, the first of them in answers; its own name if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    service: ModelService
    gate: Gate
    options: HttpOptions
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.options.served_names[0] if self.options.served_names else self.service.name

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound unless the name is the model's."""
        if name not in ("default", self.service.name, *self.options.served_names):
            raise ModelNotFound(
                f"The model {reprlib.repr(name)} is not served here. "
                f"Leave model out, or give {self.model!r} or 'default'."
            )


def json_response(body: WireModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def record_of(http: Request) -> RequestRecord:
    """The request's record, which the request log has put there."""
    record = http.scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record
