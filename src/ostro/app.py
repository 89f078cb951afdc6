"""The server as an ASGI application, for servers other than our own:

    uvicorn --factory ostro.app:create_app

Settings come from the same sources as for `ostro serve`, except for the command line. The ASGI server owns the socket,
signals and connections; the application starts and stops the models with it.
"""

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from fastapi import FastAPI

from ostro.errors import BadRequest
from ostro.server.lifecycle import assemble, build_gate, keep_telling, start_logging
from ostro.server.models.build import build_models
from ostro.server.models.files import sweep_cache
from ostro.server.models.served import Models
from ostro.server.settings import Given, ServeSettings, read_settings
from ostro.server.telemetry.tracing.start import Tracer, start_tracing
from ostro.system.env_file import read_cache_variables

# Decided by the ASGI server's own options.
_NOT_OURS = ("host", "port", "drain_timeout", "listed")


def create_app(config: str | Path | None = None, **settings: object) -> FastAPI:
    """The application, with settings from the arguments, the environment, `.env` and a YAML file, in that order of
    precedence.

    `config` names the YAML file; if it is None, OSTRO_CONFIG does. Raises BadRequest for invalid settings. A model that
    cannot be loaded is reported in the log and by /readyz: the process is not ours to end.
    """
    for name in settings.keys() - ServeSettings.model_fields.keys():
        close = difflib.get_close_matches(name, ServeSettings.model_fields, 1)
        cure = f"Did you mean {close[0]}?" if close else "docs/configuration.md lists them all."
        raise BadRequest(f"create_app({name}=…) is not a setting. {cure}", param=name)
    read_cache_variables()
    given = {name: Given(value, f"create_app({name}=…)") for name, value in settings.items()}
    merged = read_settings(given, config=None if config is None else Path(config))
    chosen = merged.settings
    keyring = chosen.keyring()
    start_logging(merged)
    # `ostro serve` logs where it listens; here the ASGI server does, in the same format.
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)
    log = structlog.stdlib.get_logger("ostro.server")
    for name in _NOT_OURS:
        if (origin := merged.chosen(name)) is not None:
            log.warning(f"{name} from {origin} is ignored: the ASGI server decides it.")
    sweep_cache()
    models = build_models(chosen)
    gate = build_gate(chosen, keyring, models)
    tracer = start_tracing(chosen.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _running(models, tracer):
            yield
            gate.drain()

    return assemble(chosen, keyring, models, gate, tracer, lifespan=lifespan)


@asynccontextmanager
async def _running(models: Models, tracer: Tracer | None) -> AsyncIterator[None]:
    await models.start()
    telling = asyncio.create_task(keep_telling(models), name="news")
    try:
        yield
    finally:
        telling.cancel()
        await models.stop()
        if tracer is not None:
            # May wait for a collector.
            await asyncio.to_thread(tracer.stop)
