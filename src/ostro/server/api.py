"""Shared by all endpoints: models, admission gate, limits, and helpers for responses."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.schemas.wire import WireModel
from ostro.server.admission.ledger import Ledger
from ostro.server.admission.limits import Gate
from ostro.server.dialects.responses.store import ResponseStore
from ostro.server.http.body import BodyLimits, Schema, read_request
from ostro.server.models.served import Models
from ostro.server.telemetry.record import RequestRecord


class SamplingRequest(Protocol):
    """A request of any endpoint that generates."""

    def sampling_params(self) -> SamplingParams: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    body: BodyLimits = field(default_factory=BodyLimits)
    ping_seconds: float = 15.0
    """Silence after which a stream sends a ping: proxies close connections that are silent for a minute."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The operator's sampling defaults, which take precedence over the model's own."""
    seed: int | None = None
    """The seed of requests that set none. If None, each of them draws its own."""
    openai_strict: bool = False
    """Whether responses use only values that OpenAI's API defines."""
    healthz_waits: bool = False
    """Whether /healthz means ready, as /readyz does, rather than alive."""

    profile_directory: Path | None = None
    """Directory that /admin/profile writes to; None refuses profiles."""
    prefills: bool = False
    """Whether the server computes prompts for other servers: /prefill."""
    response_store_bytes: int = 64 << 20
    """Memory for stored responses; 0 stores none."""
    response_store_seconds: float = 3600.0

    def ledger(self, gate: Gate) -> Ledger:
        """For what the gate's requests hold."""
        return Ledger(
            self.body.budget,
            most_stored=self.response_store_bytes,
            num_keys=gate.num_keys,
            num_places=gate.num_places,
        )

    def params(self, request: SamplingRequest) -> SamplingParams:
        """The request's parameters, with the operator's defaults for those that it does not set."""
        params = self.defaults.fill(request.sampling_params())
        if params.max_tokens is None and self.defaults.max_tokens is not None:
            # It takes precedence over the endpoint's own default, too.
            params = params.with_changes(default_max_tokens=self.defaults.max_tokens)
        if params.seed is None and self.seed is not None:
            params = params.with_changes(seed=self.seed)
        return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    models: Models
    gate: Gate
    options: HttpOptions
    responses: ResponseStore
    started: int = field(default_factory=lambda: int(time.time()))

    async def read(self, schema: type[Schema], http: Request) -> Schema:
        """Parses the body; raises if it is invalid. Does not read the body of a request that cannot be admitted."""
        self.gate.check(record_of(http))
        return await read_request(schema, http, self.options.body)


def json_response(body: WireModel) -> Response:
    return Response(written(body), media_type="application/json")


def written(body: WireModel) -> bytes:
    """The object as JSON. Entries of its longest list are encoded one by one: each call holds the GIL, and one call for
    a million log-probabilities would hold it for a second.
    """
    lists = [(len(value), name) for name, value in body if isinstance(value, list) and value]
    length, name = max(lists, default=(0, ""))
    entries = getattr(body, name, [])
    if length < 2 or not isinstance(entries[0], WireModel):
        return body.model_dump_json().encode()
    rest = body.model_dump_json(exclude={name}).encode()
    parts = b",".join(entry.model_dump_json().encode() for entry in entries)
    return b'%b%b"%b":[%b]}' % (rest[:-1], b"," if len(rest) > 2 else b"", name.encode(), parts)


def record_of(http: Request) -> RequestRecord:
    """The request's record, set by the request log."""
    record = http.scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


def end_record(http: Request, record: RequestRecord) -> None:
    """Counts and logs work that outlived its HTTP request, under a record of its own."""
    http.scope["state"]["end_record"](record)
