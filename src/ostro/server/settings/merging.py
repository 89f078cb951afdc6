"""Merges all sources: command line > environment > .env > YAML > installation > defaults. Applies implied settings, and
refuses contradictory ones.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import DotEnvSettingsSource, EnvSettingsSource

from ostro.devices import can_divide, device_kind_here
from ostro.errors import BadRequest
from ostro.server.settings.fields import ServeSettings, bad_model_settings
from ostro.server.settings.names import SECRETS
from ostro.server.settings.sources import (
    IN_DOTENV,
    IN_ENVIRONMENT,
    File,
    Given,
    check_environment,
    found_files,
    from_environment,
    from_yaml,
    named_config,
)
from ostro.server.settings.wording import complaint, short, shown
from ostro.system.env_file import CACHE_VARIABLES
from ostro.system.machine import free_memory, in_container

INSTALLED_DEFAULTS = Path(sys.prefix) / "etc" / "ostro.yaml"
"""A YAML file of defaults that comes with an installation, as in our images. Any other source takes precedence."""

# Values that a setting implies for unset ones. If two imply the same one, the first wins.
IMPLIED: Mapping[str, Mapping[str, object]] = {
    "local_dev": {
        "device": "cpu",
        "quantize": "int8",
        "max_models": 1,
        "max_concurrent_requests": 1,
        "max_batch_seqs": 8,
    },
    "gcs_bucket": {
        "port": 8080,
        "max_models": 2,
        "max_concurrent_requests": 50,
        "default_max_tokens": 512,
        "default_temperature": 0.7,
    },
    # Naming origins, or allowing credentials, implies CORS.
    "cors_origins": {"enable_cors": True},
    "cors_credentials": {"enable_cors": True},
}
# Values that switch a setting off, as text or in YAML.
_OFF = ("", "0", "false", "no", "off", "[]", "()")
# Share of the memory free at startup that several models' engines may use.
_BUDGET_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Merged:
    settings: ServeSettings
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """Things in the sources that were deliberately ignored, one line each, for the log."""
    dotenv_cache: Mapping[str, str] = field(default_factory=dict)
    """Variables in .env that move the model cache, which is not a setting."""

    def from_outside(self) -> dict[str, dict[str, str]]:
        """Settings from the environment or .env, by place: easily overlooked. Secrets are masked."""
        found: dict[str, dict[str, str]] = {".env": dict(self.dotenv_cache), "environment": {}}
        for name, origin in self.origins.items():
            for ending, place in ((IN_DOTENV, ".env"), (IN_ENVIRONMENT, "environment")):
                if origin.endswith(ending) and not origin.startswith("implied"):
                    found[place][name] = shown(getattr(self.settings, name))
        return {place: settings for place, settings in found.items() if settings}

    def chosen(self, name: str) -> str | None:
        """Where it was set explicitly; None if it is implied or a default."""
        origin = self.origins.get(name)
        is_default = origin is None or origin.startswith("implied by") or origin.endswith(f" in {INSTALLED_DEFAULTS}")
        return None if is_default else origin

    def in_users_words(self, message: str) -> str:
        """The message with flags as the user gave them, where it has the settings' own names."""
        for name, origin in self.origins.items():
            own = f"--{name.replace('_', '-')}"
            if not origin.startswith("--") or origin == own or " " in origin:
                continue
            message = re.sub(rf"{own}(?![\w-])", origin, message)
            # A name of one word, such as model, is a word of English, too.
            if "_" in name:
                message = re.sub(rf"(?<![\w-]){name}(?![\w-])", f"{name} ({origin})", message, count=1)
        return message

    def describe(self) -> str:
        """All settings as YAML, each with its origin; secrets are masked."""
        lines = [f"{name}: {shown(getattr(self.settings, name))}" for name in ServeSettings.model_fields]
        width = min(max(len(line) for line in lines), 50)
        origins = (self.origins.get(name, "default") for name in ServeSettings.model_fields)
        return "".join(f"{line:<{width}}  # {origin}\n" for line, origin in zip(lines, origins, strict=True))


def read_settings(
    given: Mapping[str, Given],
    *,
    config: Path | None = None,
    directory: Path = Path(),
    environ: Iterable[str] = os.environ,
) -> Merged:
    """Merges `given`, from the command line, with the environment, `.env` in the directory, and a YAML file."""
    check_environment(environ)
    named = config or named_config(directory)
    file = from_yaml(named) if named is not None else found_files(directory)
    dotenv = DotEnvSettingsSource(ServeSettings, env_file=directory / ".env")
    check_environment(dotenv.env_vars, IN_DOTENV)
    sources = [
        from_yaml(INSTALLED_DEFAULTS if INSTALLED_DEFAULTS.is_file() else None).settings,
        file.settings,
        from_environment(dotenv, IN_DOTENV),
        from_environment(EnvSettingsSource(ServeSettings), IN_ENVIRONMENT),
        given,
    ]
    merged = {name: each for source in sources for name, each in source.items()}
    notes = file.notes + (_fit_training(file, merged) if file.is_training else ())
    said = frozenset(merged)
    for cause, implied in IMPLIED.items():
        if cause in merged and str(merged[cause].value).lower() not in _OFF:
            origin = f"implied by {merged[cause].origin}"
            fitting = _fitting(cause, implied, merged)
            merged = {name: Given(value, origin) for name, value in fitting.items()} | merged
    if "checkpoint_path" in merged and "model" in merged:
        raise BadRequest(
            f"checkpoint_path ({merged['checkpoint_path'].origin}) and model ({merged['model'].origin}) exclude each "
            "other. Keep one of them.",
            param="checkpoint_path",
        )
    try:
        settings = ServeSettings(**{name: each.value for name, each in merged.items()})  # type: ignore[arg-type]
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], merged) from None
    _check_together(settings)
    if settings.has_several:
        implied = _implied_by_several(settings, said, merged)
        settings = settings.model_copy(update={name: each.value for name, each in implied.items()})
        merged |= implied
    for name in SECRETS:
        # An unset variable in a script must not open the server to everyone.
        if name in merged and isinstance(merged[name].value, str) and not getattr(settings, name):
            raise BadRequest(f"{name} ({merged[name].origin}) holds no key. Give one, or leave it out.", param=name)
    cache = {name: value for name in CACHE_VARIABLES if (value := dotenv.env_vars.get(name)) and _in_force(name, value)}
    return Merged(settings, {name: each.origin for name, each in merged.items()}, notes, cache)


def _fitting(cause: str, implied: Mapping[str, object], merged: Mapping[str, Given]) -> dict[str, object]:
    """What a setting implies here, which can depend on the environment and on other settings."""
    fitting = dict(implied)
    if cause == "gcs_bucket" and in_container():
        # A container is only reachable from outside.
        fitting["host"] = "0.0.0.0"
    on_cpu = "device" not in merged or merged["device"].value == "cpu"
    on_jax = "backend" in merged and merged["backend"].value == "jax"
    if cause == "local_dev" and (on_jax or not on_cpu):
        # int8 is for CPUs only, and not for JAX.
        del fitting["quantize"]
    return fitting


def _implied_by_several(
    settings: ServeSettings, said: Collection[str], merged: Mapping[str, Given]
) -> dict[str, Given]:
    """Limits for models that share a machine, if none were set."""
    cause = next(merged[name].origin for name in ("gcs_bucket", "models", "model") if name in merged)
    implied = {}
    if "max_models" not in said and settings.fills_gpu:
        implied["max_models"] = Given(1, f"implied by {cause}, on a GPU without kv_memory")
    if "memory_budget" not in said:
        implied["memory_budget"] = Given(int(free_memory() * _BUDGET_SHARE), f"implied by {cause}")
    shares_gpu = settings.on_gpu and not settings.fills_gpu and "gpu_memory_budget" not in said
    engine = settings.engine()
    if shares_gpu and (memory := settings.kind.memory(engine.tensor_parallel)) is not None:
        budget = int(memory.total * engine.gpu_memory_utilization)
        implied["gpu_memory_budget"] = Given(budget, f"implied by {cause}")
    return implied


def _in_force(variable: str, value: str) -> bool:
    """Whether the value from .env applies: the environment takes precedence."""
    return os.environ.get(variable) == value


def _fit_training(file: File, merged: dict[str, Given]) -> tuple[str, ...]:
    """Drops a training run's precision and its number of devices if the server cannot have them, and returns notes
    about that.

    Raises BadRequest if nothing says which weights to serve.
    """
    if not merged.keys() & {"model", "checkpoint_path", "models", "gcs_bucket"}:
        raise BadRequest(
            f"{file.path} is a Levanter training config and names no weights. Give --checkpoint-path or "
            "--hf-checkpoint.",
            param="checkpoint_path",
        )
    device, backend = (str(merged[name].value) if name in merged else "auto" for name in ("device", "backend"))
    notes = []
    dtype, devices = (merged[name] if _is_from(file, merged, name) else None for name in ("dtype", "tensor_parallel"))
    kind = device_kind_here(device, backend)
    if dtype is not None and dtype.value not in ("float32", *kind.dtypes_of(backend)):
        del merged["dtype"]
        notes.append(
            f"{dtype.origin} asks for {dtype.value}, which does not run on a {kind.label}: its usual precision is used."
        )
    if devices is not None and not _has_devices(device, backend, devices.value):
        del merged["tensor_parallel"]
        notes.append(f"{devices.origin} asks for {devices.value} devices, which are not available: one is used.")
    return tuple(notes)


def _has_devices(device: str, backend: str, asked: object) -> bool:
    """Whether enough devices exist, as far as this host can see: JAX's may belong to other hosts."""
    kind = device_kind_here(device, backend)
    if asked in (1, "auto"):
        return True
    number = int(str(asked))
    return can_divide(backend, device) and (backend == "jax" or kind.name != "cuda" or kind.memory(number) is not None)


def _is_from(file: File, merged: Mapping[str, Given], name: str) -> bool:
    """Whether the setting's value comes from this file."""
    return name in merged and merged[name] is file.settings.get(name)


def _check_together(settings: ServeSettings) -> None:
    for name in settings.model_settings:
        settings.is_pinned(name)
        own = settings.of_model(name)
        try:
            own.engine()
        except BadRequest as error:
            raise bad_model_settings(name, str(error)) from None
    _check_role(settings)
    if settings.max_bodies_size is not None and settings.max_bodies_size < settings.max_body_size:
        raise BadRequest(
            f"max_bodies_size ({settings.max_bodies_size}) is less than max_body_size ({settings.max_body_size}): the "
            "longest bodies would never fit. Raise the first or lower the second.",
            param="max_bodies_size",
        )
    if settings.enable_cors and settings.cors_credentials and "*" in settings.cors_origins:
        raise BadRequest(
            "cors_credentials needs origins by name: with * any page could act for your users. Set cors_origins."
        )
    if settings.any_model_name and settings.has_several:
        raise BadRequest(
            "any_model_name is for single-model servers: with several models, requests must name one. Leave it out, or "
            "give the first model more names with served_model_name.",
            param="any_model_name",
        )
    if not all(each.get_secret_value().isascii() for name in SECRETS for each in getattr(settings, name)):
        raise BadRequest("An API key travels in a header, so it must be plain ASCII. Choose another one.")


def _check_role(settings: ServeSettings) -> None:
    owners = (settings, *map(settings.of_model, settings.model_settings))
    if settings.role != "both" and all(each.engine().kv_shared is None for each in owners):
        raise BadRequest(
            f"role {settings.role} needs kv_shared: the directory through which prompts are handed over. Set it to the "
            "same one on prefill and decode servers.",
            param="role",
        )
    if settings.role == "decode":
        if settings.prefill_url is None:
            raise BadRequest("role decode needs prefill_url: the server that computes prompts.", param="role")
        return
    for name in ("prefill_url", "prefill_key", "prefill_min_tokens", "prefill_timeout"):
        if getattr(settings, name) != ServeSettings.model_fields[name].default:
            raise BadRequest(f"{name} is for role decode. Leave it out, or set role to decode.", param=name)


def _refusal(error: ErrorDetails, given: Mapping[str, Given]) -> BadRequest:
    name = str(error["loc"][0])
    origin, value = given[name].origin, given[name].value
    words = complaint(error)
    if name == "port" and str(value).startswith("tcp://"):
        words = "Kubernetes sets this for a Service of that name; set enableServiceLinks: false in the pod"
    told = "" if name in SECRETS else f" = {short(value)}"
    return BadRequest(f"{name}{told} ({origin}): {words}.", param=name)
