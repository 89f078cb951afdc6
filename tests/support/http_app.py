"""The HTTP app over a live service, on a real socket in the test's own event loop: for options that no flag sets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from live_service import live_models

from ostro.server.admission.ledger import Ledger
from ostro.server.admission.limits import Gate, GateLimits
from ostro.server.api import HttpOptions
from ostro.server.app import build_app
from ostro.server.models.service import ModelService


@asynccontextmanager
async def live_app(
    options: HttpOptions, limits: GateLimits | None = None, ledger: Ledger | None = None
) -> AsyncIterator[tuple[str, int, ModelService]]:
    """Its host, its port and the service below it, ready."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with live_models() as (models, service):
            app = build_app(models, gate=Gate(limits or GateLimits()), options=options, ledger=ledger)
            server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            host, port = sock.getsockname()
            try:
                yield host, port, service
            finally:
                server.should_exit = True
                await serving
