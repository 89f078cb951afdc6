"""Assembles the HTTP application from endpoints, error handlers and middleware. Does nothing else."""

from collections.abc import Sequence
from importlib import import_module, metadata

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import Lifespan

from ostro.server import error_handlers
from ostro.server.admission.ledger import Ledger
from ostro.server.admission.limits import Gate, GateLimits
from ostro.server.api import Api, HttpOptions
from ostro.server.api_docs import pages
from ostro.server.api_docs.document import document
from ostro.server.dialects.registry import FOLDERS
from ostro.server.dialects.responses.store import ResponseStore
from ostro.server.http.body import HeldRequests
from ostro.server.log.setup import RequestLog
from ostro.server.models.served import Models
from ostro.server.routes import (
    admin,
    embeddings,
    health,
    models,
    native,
    relevance,
    root,
    tokenizer,
)
from ostro.server.telemetry.record import RequestRecord


def build_app(
    served: Models,
    *,
    gate: Gate | None = None,
    options: HttpOptions | None = None,
    ledger: Ledger | None = None,
    middlewares: Sequence[Middleware] | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
    version: str | None = None,
) -> FastAPI:
    """The app for models that are started and stopped elsewhere, for example by `lifespan`.

    `middlewares` are pure ASGI, outermost first, and must include RequestLog, which creates the record that endpoints
    write to. None stands for RequestLog alone.
    """
    version = version or metadata.version("ostro")
    options = options or HttpOptions()
    gate = gate or Gate(GateLimits())
    ledger = ledger or options.ledger(gate)
    store = ResponseStore(ledger.stored, seconds=options.response_store_seconds)
    api = Api(models=served, gate=gate, options=options, responses=store)
    app = FastAPI(
        title="Ostro",
        version=version,
        description="Language models behind the OpenAI API.",
        # A redirect would send clients to whatever host their request named.
        redirect_slashes=False,
        lifespan=lifespan,
        # FastAPI's own pages load scripts from a CDN; ours do not.
        docs_url=None,
        redoc_url=None,
        # FastAPI's own would report every request a second time, and leak the text of those that it cannot parse.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        middleware=[
            *(middlewares if middlewares is not None else [Middleware(RequestLog, on_end=_ignore, access_log=False)]),
            Middleware(error_handlers.FaultBarrier),
            Middleware(HeldRequests, ledger=ledger),
        ],
    )
    error_handlers.install(app)
    for router in (
        *(import_module(f"ostro.server.dialects.{name}.routes").router(api) for name in FOLDERS),
        embeddings.router(api),
        relevance.router(api),
        native.router(api),
        models.router(api),
        tokenizer.router(api),
        admin.router(api),
        health.router(api, version),
        root.router(),
        pages.router(),
    ):
        app.include_router(router)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


def _ignore(record: RequestRecord) -> None:
    """For apps without metrics."""
