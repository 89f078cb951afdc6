"""From settings to models: which there are, what each is run with, and the pool that holds them."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.pool.catalog import Catalog, ModelSpec
from ostro.pool.pool import Footprint, ModelPool
from ostro.server.models import Models
from ostro.server.service import ModelService
from ostro.server.settings import ServeSettings
from ostro.weights.hub import parse_hub_id

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)=(?!=)(?P<rest>.+)", re.ASCII)
# What a model may have of its own: the rest is the machine's, or says which model it is.
_OWN = {field.name for field in fields(EngineConfig)} - {"model", "serving", "adapters"}


def build_models(settings: ServeSettings) -> Models:
    """Starts nothing."""
    catalog = Catalog(
        fixed_specs(settings),
        roots=roots(settings),
        make=lambda name, reference: _spec(settings, name, reference),
        list_models=_list_models,
    )
    limits = settings.pool()
    budgeted = limits.memory is not None or limits.device_memory is not None
    pool = ModelPool(
        catalog,
        lambda spec: ModelService(spec.config, stall_seconds=settings.stall_timeout),
        limits,
        expected=_expected if budgeted else None,
    )
    return Models(pool, served_names=settings.served_model_name)


def fixed_specs(settings: ServeSettings) -> list[ModelSpec]:
    """The models that were named, the first of which answers by default, and the adapters of that one."""
    given: Sequence[str | None] = settings.model or ((None,) if not roots(settings) else ())
    specs: list[ModelSpec] = []
    for each in given:
        name, reference = _split(each)
        specs.append(_spec(settings, name or reference_name(reference), reference, named=name is not None))
    if settings.lora:
        if not specs:
            raise BadRequest("An adapter needs a model to sit on: name one with --model.", param="lora")
        adapters = tuple(_adapter(each) for each in settings.lora)
        specs[0] = replace(specs[0], config=replace(specs[0].config, adapters=adapters))
        specs += [
            ModelSpec(name=name, config=specs[0].config, base=specs[0].name, adapter=name) for name, _ in adapters
        ]
    names = [spec.name for spec in specs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise BadRequest(f"Two models are called {doubled[0]!r}. Give one another name: --model NAME=…", param="model")
    # A server of one model keeps it.
    return [replace(specs[0], pinned=True)] if len(specs) == 1 and not roots(settings) else specs


def roots(settings: ServeSettings) -> tuple[str, ...]:
    """Where models are looked for."""
    bucket = settings.gcs_bucket
    return (*settings.models, *(() if bucket is None else (f"gs://{bucket}/{settings.gcs_model_prefix}",)))


def reference_name(reference: str | None) -> str:
    """What to call a model that nobody has named."""
    if reference is None:
        return "default"
    hub_id = None if Path(reference).exists() else parse_hub_id(reference)
    return hub_id[0] if hub_id is not None else Path(reference.rstrip("/")).name


def _spec(settings: ServeSettings, name: str, reference: str | None, *, named: bool = True) -> ModelSpec:
    own = dict(settings.model_settings.get(name, {}))
    pinned = bool(own.pop("pinned", False)) or name in settings.pin
    if unknown := sorted(own.keys() - _OWN):
        raise BadRequest(
            f"model_settings of {name!r}: {unknown[0]} is no setting of a model. Those are {', '.join(sorted(_OWN))}.",
            param="model_settings",
        )
    config = replace(settings.engine(), model=reference, **own)  # type: ignore[arg-type]
    return ModelSpec(name=name, config=config, pinned=pinned, named=named)


def _split(given: str | None) -> tuple[str | None, str | None]:
    """NAME=REFERENCE or REFERENCE, as (name, reference). What exists as a path is one."""
    match = None if given is None or Path(given).exists() else _NAMED.fullmatch(given)
    return (None, given) if match is None else (match["name"], match["rest"])


def _adapter(given: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(given)
    if match is None:
        raise BadRequest(f"--lora is written NAME=DIRECTORY, got {given!r}.", param="lora")
    return match["name"], match["rest"]


async def _expected(spec: ModelSpec) -> Footprint | None:
    """What a model will take, by its files; not known of one that has yet to be downloaded."""
    reference = spec.config.model
    if reference is not None and not Path(reference).exists():
        return None
    from ostro.planning import plan

    planned = await asyncio.to_thread(plan, reference, spec.config)
    if planned.device == "cuda":
        return Footprint(bytes=planned.host_bytes, device_bytes=planned.total_bytes)
    return Footprint(bytes=planned.total_bytes)


def _list_models(root: str) -> list[tuple[str, str]]:
    from ostro.sources.models import list_models

    return [(found.name, found.reference) for found in list_models(root)]
