"""Every setting of `ostro serve`: its type, its default, what it means, and what the server's parts get of it."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, AliasGenerator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ostro.backends import Backend, backend_here
from ostro.config import (
    CpuBackend,
    Device,
    DType,
    EngineConfig,
    GenerationConfig,
    HrmDialect,
    KVDType,
    Quantization,
    meaning_of,
    read_dtype,
    read_size,
)
from ostro.errors import BadRequest
from ostro.pool.pool import PoolLimits
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import MAX_SEED
from ostro.server.api import HttpOptions
from ostro.server.auth import Keyring, read_key_file
from ostro.server.body import BodyLimits
from ostro.server.hosts import HostRule, check_pattern
from ostro.server.limits import GateLimits
from ostro.server.settings.names import ALIASES, PREFIX, Names
from ostro.server.settings.wording import complaint, short

# Of a memory budget, for one model's keys and values.
_KV_SHARE = 0.25


def _env_names(field: str) -> AliasChoices:
    return AliasChoices(PREFIX + field.upper(), *ALIASES.get(field, Names()).env)


def _only(values: set[object], reason: str) -> AfterValidator:
    """For a setting of which this build can honour some values only."""

    def check(given: object) -> object:
        if given not in values:
            raise ValueError(reason)
        return given

    return AfterValidator(check)


def _listed(value: object) -> object:
    """Texts may be separated by commas, each of several too."""
    if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _log_format(value: object) -> object:
    return "text" if value == "pretty" else value


def _dtype(value: object) -> object:
    return read_dtype(value) or value if isinstance(value, str) else value


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _memory_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return read_size(value.strip())
    except ValueError:
        raise ValueError("a memory size is written 512M or 2G") from None


def _http_address(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address is written http://HOST:PORT; a collector's port for HTTP is 4318 as a rule")
    return value


Positive = Annotated[int, Field(ge=1)]
Hosts = Annotated[
    tuple[Annotated[str, AfterValidator(check_pattern)], ...],
    BeforeValidator(_listed),
]
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
References = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_listed)]
Bytes = Annotated[int, BeforeValidator(_memory_size), Field(ge=1)]


class ServeSettings(BaseSettings):
    """Every setting of `ostro serve`. Read them with `read_settings`."""

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
    )

    # models
    model: References = Field(
        (),
        description=(
            "a short name (see `ostro models available`), a directory, a file, a Hub id, gs://…, s3://… or "
            "pypi:NAME==VERSION; also the one argument. "
            "NAME=… gives it a name; may be given several times, and the first answers requests that name no "
            "model (default: the embedded model)"
        ),
    )
    checkpoint_path: str | None = Field(
        None, description="a checkpoint of Levanter's, or a run, whose newest one is taken; in place of a model"
    )
    levanter_config: str | None = Field(None, description=meaning_of("model_config"))
    models: References = Field(
        (),
        description=(
            "a directory, gs://… or s3://…: every model in it is loaded when it is first asked for; may be "
            "given several times"
        ),
    )
    lora: References = Field(
        (),
        description=(
            "NAME=DIRECTORY of a PEFT adapter of the first model, served under its own name; may be given several times"
        ),
    )
    pin: Texts = Field(
        (), description=("models that are loaded at the start and never make room for others; for an adapter, its base")
    )
    memory_budget: Bytes | None = Field(
        None,
        description=(
            "memory that all engines together may take, such as 12G; the least recently used model that "
            "nobody uses makes room. Of it one model's keys and values take a quarter at most, unless "
            "kv_memory is set (default: none; of several models, 80 % of what is free at the start)"
        ),
    )
    gpu_memory_budget: Bytes | None = Field(
        None,
        description=(
            "the same on the GPU (default: none; of several models with kv_memory, gpu_memory_utilization of the GPU)"
        ),
    )
    max_models: Positive | None = Field(
        None,
        description=(
            "models loaded at a time (default: none; of several models on a GPU, 1 unless kv_memory or "
            "gpu_memory_budget is set)"
        ),
    )
    load_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        60.0,
        description=(
            "seconds that a request waits for its model to be loaded; then 503 with a Retry-After from measured loads"
        ),
    )
    idle_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="seconds after which a model that nobody uses is unloaded"
    )
    model_settings: Mapping[str, Mapping[str, object]] = Field(
        {}, description="by model, its own values of engine settings, and pinned; in a config file only"
    )
    gcs_bucket: str | None = Field(
        None,
        description=(
            "a bucket whose models are served on demand, as --models gs://BUCKET/PREFIX would, on a GPU one at a time "
            "unless kv_memory or gpu_memory_budget is set; in a container it implies host 0.0.0.0, too"
        ),
    )
    gcs_model_prefix: str = Field("models/", description="where in that bucket they are")
    local_dev: bool = Field(False, description="settings for a small machine, with a bucket too")

    # engine
    tokenizer: str | None = Field(None, description=meaning_of("tokenizer"))
    chat_template: str | None = Field(None, description=meaning_of("chat_template"))
    generation_config: GenerationConfig = Field("auto", description=meaning_of("generation_config"))
    max_seq_len: Positive | None = Field(None, description=meaning_of("max_seq_len"))
    page_size: Positive | None = Field(None, description=meaning_of("page_size"))
    pages_per_seq: Positive | None = Field(None, description=meaning_of("pages_per_seq"))
    kv_memory: Bytes | None = Field(None, description=meaning_of("kv_memory"))
    max_running_tokens: Positive | None = Field(None, description=meaning_of("max_running_tokens"))
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description=meaning_of("gpu_memory_utilization")
    )
    max_batch_tokens: Positive | None = Field(None, description=meaning_of("max_batch_tokens"))
    max_batch_seqs: Positive | None = Field(None, description=meaning_of("max_batch_seqs"))
    prefix_caching: bool = Field(True, description=meaning_of("prefix_caching"))
    hrm_dialect: HrmDialect = Field("auto", description=meaning_of("hrm_dialect"))
    hrm_config: str | None = Field(None, description=meaning_of("hrm_config"))
    hrm_num_heads: Positive | None = Field(None, description=meaning_of("hrm_num_heads"))
    hrm_h_cycles: Positive | None = Field(None, description=meaning_of("hrm_h_cycles"))
    hrm_l_cycles: Positive | None = Field(None, description=meaning_of("hrm_l_cycles"))
    hrm_h_layers: Positive | None = Field(None, description=meaning_of("hrm_h_layers"))
    hrm_l_layers: Positive | None = Field(None, description=meaning_of("hrm_l_layers"))
    hrm_steps: Positive | None = Field(None, description=meaning_of("hrm_steps"))
    hrm_halting: bool = Field(False, description=meaning_of("hrm_halting"))
    threads: Positive | None = Field(None, description=meaning_of("threads"))
    device: Device = Field("auto", description=meaning_of("device"))
    dtype: Annotated[DType, BeforeValidator(_dtype)] = Field("auto", description=meaning_of("dtype"))
    quantize: Quantization = Field("none", description=meaning_of("quantize"))
    kv_dtype: KVDType = Field("auto", description=meaning_of("kv_dtype"))
    cpu_backend: CpuBackend = Field("auto", description=meaning_of("cpu_backend"))
    tensor_parallel: Annotated[int, _only({1}, "a model runs on one device in this build")] = Field(
        1, description="devices that a model runs on: one, in this build"
    )
    enable_chunked_prefill: Annotated[bool, _only({True}, "long prompts are always computed in chunks")] = Field(
        True, description="always on"
    )
    disable_cuda_graph: bool = Field(
        False, description="on a GPU, launch kernels one by one instead of replaying whole steps"
    )
    cuda_graph_max_bs: Positive | None = Field(None, description=meaning_of("cuda_graph_max_bs"))
    deterministic: bool = Field(False, description=meaning_of("deterministic"))

    # network
    served_model_name: Texts = Field(
        (),
        description=(
            "what clients may call the first model, separated by commas or given several times; the first of them is "
            "used in answers, and no other model may have such a name (default: the model's name)"
        ),
    )
    any_model_name: bool = Field(
        False,
        description=(
            "serve requests whatever model they name, for clients that cannot be told the name; of a server of one "
            "model, whose own name is in the answers"
        ),
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8000, description="port to listen on; 0 picks a free one and logs it"
    )
    allowed_hosts: Hosts = Field(
        (),
        description=(
            "names that clients without a key may call the server by, such as ostro.example.com or *.example.com; * is "
            "any. IP addresses, localhost, the name in host and, with host 0.0.0.0, the machine's own name are always "
            "allowed; with api_key all are"
        ),
    )
    openai_strict: bool = Field(
        False,
        description=(
            "answers keep to OpenAI's own values: finish_reason is stop, not repetition, for an output that ran in a "
            "loop"
        ),
    )
    ui: bool = Field(False, description="a page at / to try the models in a browser")
    healthz_waits_for_model: bool = Field(
        False,
        description=(
            "/healthz answers 503 until the model is loaded and warm, as /readyz does; then do not use it as a "
            "liveness probe"
        ),
    )
    enable_cors: bool = Field(False, description="let web pages of other origins call the server")
    cors_origins: Texts = Field(("*",), description="those origins, such as https://app.example.com; * is any")
    cors_credentials: bool = Field(False, description="let them send credentials; never together with *")

    date_header: bool = Field(True, description="a Date header in every answer")

    # who
    api_key: Secrets = Field((), description="keys that clients must send")
    api_key_file: Path | None = Field(None, description="a file of such keys, one a line; # begins a comment")
    priority_key: Secrets = Field(
        (), description="keys like those of api_key that may also send a negative priority; admin keys may, too"
    )
    admin_key: Secrets = Field((), description="keys for /admin (default: any API key)")
    share_prefix_cache: bool = Field(
        False,
        description=(
            "let all keys share cached prompts: faster where they send the same ones, but cached_tokens and the time "
            "to the first token then tell each what others have sent"
        ),
    )

    # how much
    max_concurrent_requests: Positive | None = Field(
        None,
        description=(
            "requests handed to the engine at a time; one of several prompts or choices counts as so many, and as half "
            "of all at most (default: twice max_batch_seqs, or 512)"
        ),
    )
    max_new_tokens: Positive | None = Field(
        None, description="most tokens a request may ask for; more is a 400 (default: what fits)"
    )
    default_max_tokens: Positive | None = Field(
        None,
        description=(
            "most tokens for a request that sets no limit (default: 16 for completions and 128 for /generate; for chat "
            "the model's own number, 1024 for the embedded model, else what fits)"
        ),
    )
    default_temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="temperature of a request that names none (default: the model's own, else 1)"
    )
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = Field(
        None,
        description=(
            "seed of a request that brings none, so that the same request gets the same answer "
            "(default: a fresh one for each request)"
        ),
    )
    max_queue_requests: Annotated[int, Field(ge=0)] = Field(
        1024, description="requests that may wait for the engine; then 429"
    )
    max_queue_tokens: Positive = Field(1_000_000, description="prompt tokens that may wait for it; then 429")
    max_connections: Positive | None = Field(
        None,
        description=(
            "open connections; beyond that idle ones are closed, then those whose request has not come in full, and if "
            "all are busy a new one gets 503 (default: seven eighths of the files that the process may open)"
        ),
    )
    max_body_size: Bytes = Field(64 << 20, description="largest body of a request, such as 64M; then 413")
    max_bodies_size: Bytes | None = Field(
        None,
        description="most bytes that the bodies of all requests under way may take together; then 503 with "
        "Retry-After. Bodies of up to 64K have as much again for themselves (default: twice --max-body-size, at least "
        "64M)",
    )
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        300.0, description="seconds a request may take, waiting included; then 504"
    )
    stall_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        60.0, description="seconds without progress after which the engine is started anew"
    )
    load_stall_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        600.0, description="seconds without progress after which loading a model is given up, as on a dead file system"
    )
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        8.0, description="seconds that requests under way get at shutdown"
    )

    # what it says
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lowered)] = Field(
        "info", description="debug, info, warning or error, in any case: the least that is logged"
    )
    log_format: Annotated[Literal["auto", "json", "text"], BeforeValidator(_log_format)] = Field(
        "auto", description="json, one object a line; text or pretty, for people; auto: text on a terminal, else json"
    )
    color: bool = Field(True, description="colour on a terminal, unless NO_COLOR is set in the environment")
    access_log: bool = Field(True, description="one line a request")
    logging_config: Path | None = Field(None, description="a logging.yaml in the form of logging.config.dictConfig")
    otlp_endpoint: Annotated[str, AfterValidator(_http_address)] | None = Field(
        None,
        description="a collector of OpenTelemetry's that gets a trace of each request, such as http://localhost:4318",
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
        # `read_settings` has merged all sources: it must know where each value came from.
        return (init_settings,)

    @property
    def references(self) -> tuple[str, ...]:
        """The models that are named one by one."""
        return self.model if self.checkpoint_path is None else (self.checkpoint_path,)

    @property
    def has_several(self) -> bool:
        """Whether models share the machine."""
        return bool(self.models or self.gcs_bucket) or len(self.references) > 1

    @property
    def backend(self) -> Backend:
        """The device that models run on."""
        return backend_here(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.backend.has_own_memory

    @property
    def fills_gpu(self) -> bool:
        """Whether each engine takes what it finds of a GPU, so that there is no room for a second one."""
        return self.kv_memory is None and self.gpu_memory_budget is None and self.on_gpu

    def of_model(self, name: str) -> "ServeSettings":
        """With those of one model in place of what holds for all. Raises BadRequest for what is no setting of one."""
        own = {key: value for key, value in self.model_settings.get(name, {}).items() if key != "pinned"}
        for key in own.keys() - OWN:
            close = difflib.get_close_matches(str(key), OWN, 1)
            cure = f"Did you mean {close[0]}?" if close else f"Those are {', '.join(sorted(OWN))}."
            raise wrong_own(name, f"{key} is no setting of a model. {cure}")
        try:
            given = ServeSettings(**own)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            raise wrong_own(name, f"{key} = {short(own[key])}: {complaint(first)}.") from None
        return self.model_copy(update={key: getattr(given, key) for key in own})

    def is_pinned(self, name: str) -> bool:
        """By its own settings."""
        pinned = self.model_settings.get(name, {}).get("pinned", False)
        if not isinstance(pinned, bool):
            raise wrong_own(name, f"pinned = {short(pinned)}: it must be true or false.")
        return pinned

    def engine(self) -> EngineConfig:
        """For all models alike: the model itself is left out."""
        return EngineConfig(
            kv_memory_limit=self._kv_limit(),
            model_config=self.levanter_config,
            tokenizer=self.tokenizer,
            chat_template=self.chat_template,
            generation_config=self.generation_config,
            max_seq_len=self.max_seq_len,
            device=self.device,
            dtype=self.dtype,
            quantize=self.quantize,
            kv_dtype=self.kv_dtype,
            cpu_backend=self.cpu_backend,
            page_size=self.page_size,
            pages_per_seq=self.pages_per_seq,
            kv_memory=self.kv_memory,
            max_running_tokens=self.max_running_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cuda_graphs=not self.disable_cuda_graph,
            cuda_graph_max_bs=self.cuda_graph_max_bs,
            deterministic=self.deterministic,
            serving=True,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_seqs=self.max_batch_seqs,
            prefix_caching=self.prefix_caching,
            hrm_dialect=self.hrm_dialect,
            hrm_config=self.hrm_config,
            hrm_num_heads=self.hrm_num_heads,
            hrm_h_cycles=self.hrm_h_cycles,
            hrm_l_cycles=self.hrm_l_cycles,
            hrm_h_layers=self.hrm_h_layers,
            hrm_l_layers=self.hrm_l_layers,
            hrm_steps=self.hrm_steps,
            hrm_halting=self.hrm_halting,
            threads=self.threads,
        )

    def _kv_limit(self) -> int | None:
        """Keys and values of one model may not use up a budget."""
        if self.memory_budget is None and self.gpu_memory_budget is None:
            return None
        budget = self.gpu_memory_budget if self.on_gpu else self.memory_budget
        return None if budget is None else int(budget * _KV_SHARE)

    def gate(self) -> GateLimits:
        return GateLimits(
            concurrent=self.max_concurrent_requests or 2 * (self.max_batch_seqs or 256),
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


OWN = frozenset(ServeSettings.model_fields) & {each.name for each in fields(EngineConfig)} - {"model"} | {
    "disable_cuda_graph",
    "levanter_config",
}
"""What a model may have of its own: the rest is the machine's, or says which model it is."""


def wrong_own(name: str, words: str) -> BadRequest:
    return BadRequest(f"model_settings of {name!r}: {words}", param="model_settings")
