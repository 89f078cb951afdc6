"""Builds the pool of models from settings: the models, and the engine settings of each."""

import asyncio
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS, check_settings, runs_on_jax
from ostro.errors import BadRequest, ModelError, ModelNotFound, OstroError
from ostro.pool.catalog import Catalog, ModelSpec, resolve
from ostro.pool.pool import Files, Footprint, ModelPool
from ostro.sampling_defaults import SamplingDefaults
from ostro.server.models.files import CachedModelFiles
from ostro.server.models.plans import Planner, planned, recommended_sampling
from ostro.server.models.served import ANY, Models
from ostro.server.models.service import ModelService
from ostro.server.settings import ServeSettings
from ostro.sources.address import is_address
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ostro.sources.place import find_place
from ostro.sources.references import parse_model
from ostro.system.mesh_hosts import mesh_hosts
from ostro.weights.adapter import read_base

if TYPE_CHECKING:
    from ostro.server.models.remote_prefill import RemotePrefill
    from ostro.sources.models import AdapterFiles, FoundModel

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)=(?!=)(?P<rest>.+)", re.ASCII)

_log = logging.getLogger(__name__)


def build_models(settings: ServeSettings) -> Models:
    """The models as configured. Starts nothing. Raises BadRequest if a directory of models does not exist."""
    _check_directories(settings)
    specs = fixed_specs(settings)
    configs = settings.engine(), *(spec.config for spec in specs)
    for config in configs:
        check_settings(config)
    catalog = Catalog(
        specs,
        roots=roots(settings),
        make=partial(_found_spec, settings, [spec.name for spec in specs]),
        list_models=_list_models,
    )
    limits = settings.pool()
    if any(map(runs_on_jax, configs)) and mesh_hosts() is not None:
        _check_hosts(settings)
        limits = replace(limits, unloads=False)
    if settings.has_several:
        _tell_limits(settings)
    budgeted = limits.memory is not None or limits.device_memory is not None
    files = CachedModelFiles(settings.load_stall_timeout)
    pool = ModelPool(
        catalog,
        partial(_service, settings),
        limits,
        model_files=files,
        expected=_expected if budgeted else None,
    )
    elsewhere = _names_elsewhere(settings, specs)
    return Models(
        pool,
        served_names=settings.served_model_name,
        any_name=settings.any_model_name,
        aliases=_aliases(settings, [spec.name for spec in specs]),
        first=[
            *(spec.name for spec in specs if spec.pinned or spec is specs[0]),
            *(name for name in elsewhere if name in settings.pin or settings.is_pinned(name)),
        ],
        mentioned=elsewhere,
        arrived=files.arrived,
        planner=Planner(settings.engine()),
    )


def _check_directories(settings: ServeSettings) -> None:
    for place in settings.models:
        if not is_address(place) and not Path(place).expanduser().is_dir():
            raise BadRequest(
                f"models names {place}, but there is no such directory. Correct the path, or make the directory first: "
                "models that are put there later are found.",
                param="models",
            )


def _check_hosts(settings: ServeSettings) -> None:
    """Several hosts load one model together, once: only the first of them would hear of a request to load another."""
    names = [name for name in ("models", "gcs_bucket") if getattr(settings, name)]
    if len(settings.references) > 1:
        names.append("model")
    if names:
        raise BadRequest(
            f"{' and '.join(names)} must not name more than one model, since several hosts run one together. Give one "
            "with --model on every host.",
            param=names[0],
        )
    if settings.idle_timeout is not None:
        raise BadRequest(
            "idle_timeout would unload the model on the first of several hosts only. Leave it out on every host.",
            param="idle_timeout",
        )


def fixed_specs(settings: ServeSettings) -> list[ModelSpec]:
    """The models named in settings, the first of which is the default, and the adapters of that one."""
    given: Sequence[str | None] = settings.references or ((None,) if not roots(settings) else ())
    named = [(name or parse_model(reference).name, reference) for name, reference in map(_split, given)]
    names = [*(name for name, _ in named), *(name for name, _ in map(_adapter, settings.lora))]
    specs = [_spec(settings, name, reference, names) for name, reference in named]
    if settings.lora:
        if not specs:
            raise BadRequest("An adapter needs a base model: name one with --model.", param="lora")
        adapters = tuple(_adapter(each) for each in settings.lora)
        specs[0] = replace(specs[0], config=replace(specs[0].config, adapters=adapters))
        specs += [
            ModelSpec(name=name, config=specs[0].config, base=specs[0].name, adapter=name) for name, _ in adapters
        ]
    _check_names(settings, names)
    _aliases(settings, names)
    _names_elsewhere(settings, specs)
    if not specs:
        return []
    # The only model of a server stays loaded, and pinning an adapter pins its base.
    alone = len(named) == 1 and not roots(settings)
    by_other_names = {*_names_of_first(settings), *names[len(named) :]}
    stays = alone or any(_name_in_settings(name, settings.pin, names) is not None for name in by_other_names)
    return [replace(specs[0], pinned=specs[0].pinned or stays), *specs[1:]]


def outlook(settings: ServeSettings) -> list[str]:
    """One line per named model that says what will run it, or that it is not on this machine yet. Downloads nothing."""
    try:
        specs = [spec for spec in fixed_specs(settings) if spec.base is None]
    except OstroError as error:
        return [error.message]
    defaults, cap = settings.http().defaults, settings.max_new_tokens
    return [f"{spec.name}: {_outlook(spec, defaults, cap)}" for spec in specs]


def _outlook(spec: ModelSpec, defaults: SamplingDefaults, cap: int | None) -> str:
    from ostro.backends.choosing import check_without_torch

    config = spec.config
    try:
        place = find_place(config.model, newest=False)
        if place is None:
            return "not on this machine yet"
        check_without_torch(place.path, config)
        plan = planned(str(place.path), config)
        own = recommended_sampling(place.path, config)
    except OstroError as error:
        return error.message
    reason = "" if plan.not_native is None else f" ({plan.not_native})"
    chosen = ", ".join(f"{name} {value}" for name, value in defaults.over(own).capped(cap).given.items())
    sampling = f"; default sampling: {chosen}" if chosen else ""
    return f"{plan.backend}, {plan.precision}{reason}{sampling}"


def roots(settings: ServeSettings) -> tuple[str, ...]:
    """The directories and buckets that are searched for models."""
    bucket = settings.gcs_bucket
    return (*settings.models, *(() if bucket is None else (f"gs://{bucket}/{settings.gcs_model_prefix}",)))


def _found_spec(settings: ServeSettings, fixed: Collection[str], found: "FoundModel") -> ModelSpec:
    """The spec of a model or adapter that was found under a root: see `Catalog`."""
    name = found.name
    if name in _names_of_first(settings):
        raise BadRequest(f"{name!r} means the first model here, or none in particular. Give this one another name.")
    if found.adapter is None:
        return _spec(settings, name, found.reference, fixed)
    if _name_in_settings(name, settings.model_settings, fixed) is not None:
        raise BadRequest("it is an adapter, and has the settings of its base. Leave it out of model_settings.")
    return ModelSpec(
        name=name,
        config=EngineConfig(model=found.reference),
        pinned=_name_in_settings(name, settings.pin, fixed) is not None,
        adapter=name,
        base=_base(found.adapter),
    )


def _base(adapter: "AdapterFiles") -> str:
    """The adapter's name for its base. Raises ModelError or ModelNotFound for an adapter that would keep its base from
    loading, as far as can be told without the weights.
    """
    told = read_base(adapter.config)
    if not adapter.has_weights:
        raise ModelNotFound(f"there is no {ADAPTER_WEIGHTS} beside its {ADAPTER_CONFIG}. Upload it.")
    base = adapter.base or told
    if base is None:
        raise ModelNotFound("it does not say what its base is. Name it in a file base_model in its directory.")
    return base


def _spec(settings: ServeSettings, name: str, reference: str | None, names: Collection[str]) -> ModelSpec:
    key = _name_in_settings(name, settings.model_settings, names)
    own = settings if key is None else settings.of_model(key)
    pinned = _name_in_settings(name, settings.pin, names) is not None or (key is not None and settings.is_pinned(key))
    return ModelSpec(name=name, config=replace(own.engine(), model=reference), pinned=pinned)


def _name_in_settings(name: str, said: Collection[str], names: Collection[str]) -> str | None:
    """The model's name in settings, if it occurs there, perhaps in a spelling that no other model uses."""
    found = resolve(name, said)
    return None if found != name and found in names else found


def _names_elsewhere(settings: ServeSettings, specs: Sequence[ModelSpec]) -> list[str]:
    """Names in settings that can only be models under a root. Raises BadRequest if there are no roots."""
    bases = [spec.name for spec in specs if spec.base is None]
    pinnable = [*(spec.name for spec in specs), *(_names_of_first(settings) if specs else ())]
    known = {"pin": pinnable, "model_settings": bases, "model_alias": pinnable}
    targets = tuple(model for _, model in map(_split_alias, settings.model_alias))
    said = {"pin": settings.pin, "model_settings": tuple(settings.model_settings), "model_alias": targets}
    missing = [(where, name) for where, names in said.items() for name in names if resolve(name, known[where]) is None]
    for where, name in missing:
        if not roots(settings):
            raise BadRequest(
                f"{where} names {name!r}, but there is no such model. Known models: {', '.join(known[where])}.",
                param=where,
            )
    return list(dict.fromkeys(name for _, name in missing))


def _check_names(settings: ServeSettings, names: Sequence[str]) -> None:
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise BadRequest(f"Two models are called {doubled[0]!r}. Give one another name: --model NAME=…", param="model")
    if settings.served_model_name and not names:
        raise BadRequest(
            "served_model_name is for the first model that was named, and none was. Leave it out, or name one with "
            "--model.",
            param="served_model_name",
        )
    for name in names[1:]:
        if name in _names_of_first(settings):
            raise BadRequest(
                f"{name!r} means the first model, so no other can be called that. Give one of them another name.",
                param="served_model_name" if name in settings.served_model_name else "model",
            )


def _aliases(settings: ServeSettings, names: Collection[str]) -> dict[str, str]:
    """Further names of models. Raises BadRequest if one belongs to a model already."""
    pairs = [_split_alias(each) for each in settings.model_alias]
    for alias, model in pairs:
        if alias in (*names, *_names_of_first(settings)) or model != dict(pairs)[alias]:
            raise BadRequest(
                f"model_alias gives the name {alias!r} to {model!r}, but another model has it. Choose another name.",
                param="model_alias",
            )
    return dict(pairs)


def _split_alias(given: str) -> tuple[str, str]:
    alias, equals, model = (part.strip() for part in given.partition("="))
    if not (alias and equals and model):
        raise BadRequest(
            f"model_alias is {given!r}. Write it as NAME=MODEL, such as gpt-4o=default.", param="model_alias"
        )
    return alias, model


def _names_of_first(settings: ServeSettings) -> tuple[str, ...]:
    """Other names of the first model, besides its own."""
    return (ANY, *settings.served_model_name)


def _tell_limits(settings: ServeSettings) -> None:
    """Logs limits that may be defaults unknown to the user."""
    if settings.memory_budget is not None:
        _log.info("All models together may use %.1f GiB of memory (memory_budget).", settings.memory_budget / (1 << 30))
    if settings.fills_gpu:
        tell, outcome = (
            (_log.info, "one is loaded at a time")
            if settings.max_models == 1
            else (_log.warning, "a second one will not fit beside it")
        )
        tell(
            "A model takes all free GPU memory, so %s. To load several, set kv_memory or gpu_memory_budget.",
            outcome,
        )


def _split(given: str | None) -> tuple[str | None, str | None]:
    """Splits NAME=REFERENCE or REFERENCE into (name, reference). An existing path is always a reference."""
    match = None if given is None or Path(given).exists() else _NAMED.fullmatch(given)
    return (None, given) if match is None else (match["name"], match["rest"])


def _adapter(given: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(given)
    if match is None:
        raise BadRequest(f"--lora is written NAME=DIRECTORY, got {given!r}.", param="lora")
    return match["name"], match["rest"]


def _service(settings: ServeSettings, spec: ModelSpec, files: Files | None) -> ModelService:
    assert files is not None
    return ModelService(
        _here(spec, files),
        path=files.path,
        name=files.name,
        tokenizer=files.tokenizer,
        stall_seconds=settings.stall_timeout,
        load_stall_seconds=settings.load_stall_timeout,
        prefill=_prefill(settings, spec),
    )


def _prefill(settings: ServeSettings, spec: ModelSpec) -> "RemotePrefill | None":
    if settings.prefill_url is None or spec.config.kv_shared is None:
        return None
    # Imported late: it needs an HTTP client, which other roles do not.
    from ostro.server.models.remote_prefill import RemotePrefill

    keys = settings.prefill_key
    return RemotePrefill(
        settings.prefill_url,
        model=spec.name,
        key=keys[0].get_secret_value() if keys else None,
        min_tokens=settings.prefill_min_tokens,
        seconds=settings.prefill_timeout,
    )


def _here(spec: ModelSpec, files: Files) -> EngineConfig:
    """The spec's config, with the adapters' paths on this machine."""
    return replace(spec.config, adapters=files.adapters)


async def _expected(spec: ModelSpec, files: Files | None) -> Footprint | ModelError | None:
    """The memory that a model will take, estimated from its files."""
    assert files is not None
    plan = await asyncio.to_thread(planned, files.path, _here(spec, files))
    if DEVICE_KINDS[plan.device].has_own_memory:
        if not plan.num_pages:
            return ModelError(
                f"{spec.name} leaves no room for a KV cache on this GPU of {plan.memory / (1 << 30):.1f} GiB. "
                "Raise gpu_memory_utilization, lower max_batch_tokens, quantize it, or serve a smaller model."
            )
        return Footprint(bytes=plan.host_bytes, device_bytes=plan.total_bytes)
    return Footprint(bytes=plan.total_bytes)


def _list_models(root: str) -> "list[FoundModel]":
    from ostro.sources.models import list_models

    return list_models(root)
