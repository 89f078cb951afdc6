"""The server's settings and where each came from: command line > environment > .env > YAML > installation > defaults.

Knows names and values; starts nothing. A name that this build does not know is an error with a suggestion; a value that
it cannot honour is an error with the reason. Names of other servers that mean the same are in one table, ALIASES.
"""

import difflib
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, AliasChoices, AliasGenerator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

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
from ostro.env_file import as_in_dotenv
from ostro.errors import BadRequest
from ostro.machine import free_memory, in_container
from ostro.pool.pool import PoolLimits
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import MAX_SEED
from ostro.server.api import HttpOptions
from ostro.server.auth import Keyring, read_key_file
from ostro.server.body import BodyLimits
from ostro.server.hosts import HostRule, check_pattern
from ostro.server.limits import GateLimits

PREFIX = "OSTRO_"


@dataclass(frozen=True, slots=True)
class Names:
    """What else a setting is called: by flags, by environment variables, by keys of a YAML file."""

    flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    yaml: tuple[str, ...] = ()


ALIASES: Mapping[str, Names] = {
    "model": Names(
        ("--hf-checkpoint", "--model-path"), ("AIOS_MODEL_PATH",), ("hf_checkpoint", "model_path", "model_name_or_path")
    ),
    "levanter_config": Names(("--model-config",), (), ("model_config",)),
    "max_models": Names((), ("MAX_CACHED_MODELS",), ("max_cached_models",)),
    "gcs_bucket": Names((), ("GCS_BUCKET",)),
    "gcs_model_prefix": Names((), ("GCS_MODEL_PREFIX",)),
    "local_dev": Names((), ("LOCAL_DEV",)),
    "default_max_tokens": Names((), ("DEFAULT_MAX_TOKENS",)),
    "default_temperature": Names(("--temperature",), ("DEFAULT_TEMPERATURE",)),
    "served_model_name": Names(("--model-name",)),
    "dtype": Names(("--trainer.mp",)),
    "seed": Names(("--service.seed",)),
    "page_size": Names(("--service.page_size",)),
    "gpu_memory_utilization": Names(("--service.hbm_utilization",)),
    "tokenizer": Names(("--tokenizer-path",), ("AIOS_TOKENIZER_PATH",), ("tokenizer_path",)),
    "max_seq_len": Names(
        ("--max-context-length", "--context-window", "--max-model-len", "--service.max_seq_len"),
        (),
        ("max_context_length", "context_window", "max_model_len"),
    ),
    "max_batch_seqs": Names(
        ("--max-batch-size", "--max-num-seqs", "--service.max_seqs"),
        ("AIOS_MAX_BATCH_SIZE",),
        ("max_batch_size", "max_num_seqs"),
    ),
    "max_batch_tokens": Names(
        ("--max-num-batched-tokens", "--service.max_tokens_per_round"), (), ("max_num_batched_tokens",)
    ),
    "pages_per_seq": Names(("--max-pages-per-seq", "--service.max_pages_per_seq"), (), ("max_pages_per_seq",)),
    "port": Names((), ("PORT",)),
    "api_key": Names((), ("LEVANTER_API_KEY",)),
    "request_timeout": Names((), ("REQUEST_TIMEOUT",)),
    "max_new_tokens": Names((), ("AIOS_MAX_NEW_TOKENS",)),
    "max_concurrent_requests": Names((), ("MAX_CONCURRENT_REQUESTS",)),
    "cors_origins": Names((), ("AIOS_CORS_ORIGINS",)),
    "cors_credentials": Names(("--allow-credentials",), (), ("allow_credentials",)),
    "device": Names((), ("AIOS_DEVICE",)),
    "hrm_num_heads": Names(("--num-heads",), (), ("num_heads",)),
    "hrm_h_cycles": Names(("--h-cycles",), (), ("h_cycles",)),
    "hrm_l_cycles": Names(("--l-cycles",), (), ("l_cycles",)),
    "hrm_h_layers": Names(("--h-layers",), (), ("h_layers",)),
    "hrm_l_layers": Names(("--l-layers",), (), ("l_layers",)),
    "tensor_parallel": Names(("--tensor-parallel-size",), (), ("tensor_parallel_size",)),
    "otlp_endpoint": Names(("--otlp-traces-endpoint",), (), ("otlp_traces_endpoint",)),
}

# What other servers have and this build does not: refused by name, with the reason.
REFUSED: Mapping[str, str] = {
    "trust_remote_code": "code that comes with a model is never run. Leave it out.",
}
# The first setting of each group, in the order of the class: for the help and the docs.
GROUPS: Mapping[str, str] = {
    "model": "Models",
    "tokenizer": "Engine",
    "hrm_dialect": "HRM models",
    "threads": "Device and precision",
    "served_model_name": "Network",
    "api_key": "Access",
    "max_concurrent_requests": "Limits",
    "log_level": "Logging",
}
SECRETS = ("api_key", "priority_key", "admin_key")
REPEATABLE = frozenset({"model", "models", "lora", "served_model_name"})
ONLY_IN_FILES = frozenset({"model_settings"})
# Other variables of ours, read elsewhere.
_CONFIG = PREFIX + "CONFIG"
_CACHE_ENV = ("OSTRO_CACHE", "LOCAL_MODEL_CACHE", "OSTRO_CACHE_LIMIT")
# Those of compose.yaml, which may stand in an .env that the container gets whole.
_COMPOSE_ENV = ("OSTRO_MODELS_DIR", "OSTRO_PUBLISHED_PORT")
_OTHER_ENV = frozenset({_CONFIG, *_CACHE_ENV, *_COMPOSE_ENV, "OSTRO_FAULTS"})
_IN_DOTENV, _IN_ENVIRONMENT = " in .env", " in the environment"

INSTALLED_DEFAULTS = Path(sys.prefix) / "etc" / "ostro.yaml"
"""A YAML file of settings that comes with an installation, as our images have one. Whatever anybody says wins."""

# What a setting implies for others that nobody set. Of two that imply the same one, the first wins.
IMPLIED: Mapping[str, Mapping[str, object]] = {
    "local_dev": {"device": "cpu", "quantize": "int8", "max_models": 1, "max_batch_seqs": 8},
    "gcs_bucket": {
        "port": 8080,
        "max_models": 2,
        "max_concurrent_requests": 50,
        "default_max_tokens": 512,
        "default_temperature": 0.7,
    },
    # Naming origins, or letting them send credentials, is asking for CORS.
    "cors_origins": {"enable_cors": True},
    "cors_credentials": {"enable_cors": True},
}
# What switches a setting off, as text or as YAML has it.
_OFF = ("", "0", "false", "no", "off", "[]", "()")
# Of the memory that is free at the start, for the engines of several models; of a budget, for one's keys and values.
_BUDGET_SHARE, _KV_SHARE = 0.8, 0.25

# Sections of a YAML file that may hold settings, as in `serve: {hrm: {port: 9000}}`; other programs' are not ours.
_SECTIONS = frozenset({"serve", "hrm", "ostro"})


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
            raise _wrong_own(name, f"{key} is no setting of a model. {cure}")
        try:
            given = ServeSettings(**own)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            raise _wrong_own(name, f"{key} = {_short(own[key])}: {_complaint(first)}.") from None
        return self.model_copy(update={key: getattr(given, key) for key in own})

    def is_pinned(self, name: str) -> bool:
        """By its own settings."""
        pinned = self.model_settings.get(name, {}).get("pinned", False)
        if not isinstance(pinned, bool):
            raise _wrong_own(name, f"pinned = {_short(pinned)}: it must be true or false.")
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


def _wrong_own(name: str, complaint: str) -> BadRequest:
    return BadRequest(f"model_settings of {name!r}: {complaint}", param="model_settings")


# --- where they come from -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    value: object
    origin: str
    """Where it came from, in words that name the place: `--port`, `PORT in the environment`, `ostro.yaml`."""


@dataclass(frozen=True, slots=True)
class Merged:
    settings: ServeSettings
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What of the sources was left out on purpose, a line each, for the log."""
    dotenv_cache: Mapping[str, str] = field(default_factory=dict)
    """Variables of a .env that move the cache of models, which is no setting."""

    def from_outside(self) -> dict[str, dict[str, str]]:
        """What was set by neither a flag nor a config file, by place: easily overlooked. Secrets are masked."""
        found: dict[str, dict[str, str]] = {".env": dict(self.dotenv_cache), "environment": {}}
        for name, origin in self.origins.items():
            for ending, place in ((_IN_DOTENV, ".env"), (_IN_ENVIRONMENT, "environment")):
                if origin.endswith(ending) and not origin.startswith("implied"):
                    found[place][name] = _shown(getattr(self.settings, name))
        return {place: settings for place, settings in found.items() if settings}

    def chosen(self, name: str) -> str | None:
        """Where somebody has set it; None if it is implied or a default."""
        origin = self.origins.get(name)
        is_default = origin is None or origin.startswith("implied by") or origin.endswith(f" in {INSTALLED_DEFAULTS}")
        return None if is_default else origin

    def describe(self) -> str:
        """A YAML file of all settings, each with its origin; secrets are masked."""
        lines = [f"{name}: {_shown(getattr(self.settings, name))}" for name in ServeSettings.model_fields]
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
    """Merges `given`, which is the command line's, with the environment, `.env` in the directory, and a YAML file."""
    check_environment(environ)
    named = config or _named_config(directory)
    file = _from_yaml(named) if named is not None else _found(directory)
    dotenv = DotEnvSettingsSource(ServeSettings, env_file=directory / ".env")
    sources = [
        _from_yaml(INSTALLED_DEFAULTS if INSTALLED_DEFAULTS.is_file() else None).settings,
        file.settings,
        _from_environment(dotenv, _IN_DOTENV),
        _from_environment(EnvSettingsSource(ServeSettings), _IN_ENVIRONMENT),
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
            "other. Keep one of the two.",
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
        # An unset variable in a script must not open the server to everybody.
        if name in merged and isinstance(merged[name].value, str) and not getattr(settings, name):
            raise BadRequest(f"{name} ({merged[name].origin}) holds no key. Give one, or leave it out.", param=name)
    cache = {name: value for name in _CACHE_ENV if (value := dotenv.env_vars.get(name)) and _in_force(name, value)}
    return Merged(settings, {name: each.origin for name, each in merged.items()}, notes, cache)


def _fitting(cause: str, implied: Mapping[str, object], merged: Mapping[str, Given]) -> dict[str, object]:
    """What a setting implies here: some of it depends on the place and on what else was said."""
    fitting = dict(implied)
    if cause == "gcs_bucket" and in_container():
        # A container is reached from outside or not at all.
        fitting["host"] = "0.0.0.0"
    if cause == "local_dev" and "device" in merged and merged["device"].value != "cpu":
        # 8 bits are for CPUs.
        del fitting["quantize"]
    return fitting


def _implied_by_several(
    settings: ServeSettings, said: Collection[str], merged: Mapping[str, Given]
) -> dict[str, Given]:
    """Limits for models that share a machine, where nobody has set any."""
    cause = next(merged[name].origin for name in ("gcs_bucket", "models", "model") if name in merged)
    implied = {}
    if "max_models" not in said and settings.fills_gpu:
        implied["max_models"] = Given(1, f"implied by {cause}, on a GPU without kv_memory")
    if "memory_budget" not in said:
        implied["memory_budget"] = Given(int(free_memory() * _BUDGET_SHARE), f"implied by {cause}")
    shares_gpu = settings.on_gpu and not settings.fills_gpu and "gpu_memory_budget" not in said
    if shares_gpu and (memory := settings.backend.memory()) is not None:
        budget = int(memory.total * settings.gpu_memory_utilization)
        implied["gpu_memory_budget"] = Given(budget, f"implied by {cause}")
    return implied


def _from_environment(source: EnvSettingsSource, place: str) -> dict[str, Given]:
    found = {}
    for name, info in ServeSettings.model_fields.items():
        value, variable, _ = source.get_field_value(info, name)
        if value is not None:
            # A .env file was read as one; what the environment holds may have come from one that was not.
            is_raw = isinstance(value, str) and not isinstance(source, DotEnvSettingsSource)
            found[name] = Given(as_in_dotenv(variable, value) if is_raw else value, f"{variable}{place}")
    return found


def _in_force(variable: str, value: str) -> bool:
    """Whether a variable of .env is what holds: the environment beats it."""
    return os.environ.get(variable) == value


def check_environment(names: Iterable[str]) -> None:
    """A misspelt variable is refused. One that resembles none of ours is somebody else's."""
    ours = [PREFIX + name.upper() for name in ServeSettings.model_fields]
    unknown = [name for name in names if name.startswith(PREFIX) and name not in _OTHER_ENV and name not in ours]
    for name in unknown:
        # Close ones only: Kubernetes makes up variables from the names of services.
        if close := difflib.get_close_matches(name, ours, 1, 0.85):
            raise BadRequest(f"{name} in the environment is no setting. Did you mean {close[0]}?")


def _named_config(directory: Path) -> Path | None:
    """The YAML file that OSTRO_CONFIG names, in the environment or in `.env`: for servers without a command line."""
    dotenv = DotEnvSettingsSource(BaseSettings, env_file=directory / ".env", case_sensitive=True)
    named = as_in_dotenv(_CONFIG, os.environ.get(_CONFIG, "")) or dotenv.env_vars.get(_CONFIG)
    return Path(named) if named else None


@dataclass(frozen=True, slots=True)
class _File:
    """What a YAML file says."""

    path: Path | None = None
    settings: Mapping[str, Given] = field(default_factory=dict)
    is_training: bool = False
    """Whether it is the YAML of a training run of Levanter's."""
    notes: tuple[str, ...] = ()


def _found(directory: Path) -> _File:
    """What AI-OS's files in the directory say, where no other file is named."""
    from ostro.server.found_config import find_logging, find_settings

    settings: dict[str, Given] = {}
    notes: list[str] = []
    logging, note = find_logging(directory)
    if logging is not None:
        settings["logging_config"] = Given(logging, f"found at {logging}")
    notes += [] if note is None else [note]
    found = find_settings(directory)
    if found is None:
        return _File(settings=settings, notes=tuple(notes))
    return _File(found.path, settings | _gathered(found.sections, found.path, {}), notes=(found.note, *notes))


def _gathered(content: object, path: Path, found: dict[str, Given]) -> dict[str, Given]:
    """With the settings of a file, none of which may be said twice, added to those found in it before."""
    for key, name, value in _settings_in(content, path):
        if name in found:
            raise BadRequest(f"{path}: {key} says again what {found[name].origin} has said. Keep one of the two.")
        if value is not None:
            found[name] = Given(value, f"{key} in {path}")
    return found


def _from_yaml(path: Path | None) -> _File:
    if path is None:
        return _File()
    from ostro.server.levanter_training import read_training

    content = _read_yaml(path)
    training = read_training(content, path)
    found: dict[str, Given] = {}
    if training is not None:
        found = {name: Given(value, f"{key} in {path}") for name, (key, value) in training.settings.items()}
        content = {key: value for key, value in training.rest.items() if _is_ours(key)}
    if training is None:
        content, foreign = _without_foreign(content)
        note = f"{path}: sections of other programs are ignored: {', '.join(foreign)}."
        return _File(path, _gathered(content, path, found), notes=(note,) if foreign else ())
    _gathered(content, path, found)
    ignored = [*(str(key) for key in training.rest if not _is_ours(key)), *training.unused]
    note = f"{path} is a Levanter training config, of which serving uses {', '.join(_keys(found.values()))}"
    return _File(path, found, True, (f"{note}; ignored: {', '.join(ignored)}." if ignored else f"{note}.",))


def _without_foreign(content: object) -> tuple[object, list[str]]:
    """Of a file with a section `serve`, which it shares with other programs: ours, and the names of theirs."""
    if not isinstance(content, dict) or not isinstance(content.get("serve"), dict):
        return content, []
    foreign = [key for key, value in content.items() if isinstance(value, dict) and not _resembles_ours(key)]
    return {key: value for key, value in content.items() if key not in foreign}, [str(key) for key in foreign]


def _resembles_ours(key: object) -> bool:
    """Whether it is a setting, a section, or perhaps a misspelt one of them."""
    return _is_ours(key) or bool(difflib.get_close_matches(str(key).replace("-", "_"), _known_keys(), 1))


def _keys(given: Iterable[Given]) -> list[str]:
    return [each.origin.partition(" in ")[0] for each in given]


def _read_yaml(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        content: object = yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        from ostro.server.levanter_training import load_training, read_training

        # Levanter's files may have tags of its own; in ours a tag is a mistake.
        if read_training(content := load_training(text), path) is None:
            raise _not_yaml(path, error) from error
    except OSError as error:
        raise BadRequest(f"Cannot read the config file {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _not_yaml(path, error) from error
    return content


def _not_yaml(path: Path, error: Exception) -> BadRequest:
    return BadRequest(f"The config file {path} is not valid YAML: {' '.join(str(error).split())}.")


def _fit_training(file: _File, merged: dict[str, Given]) -> tuple[str, ...]:
    """Takes out the precision of a training run where this machine cannot compute in it, with a note that says so.

    Raises BadRequest if nobody says which weights to serve.
    """
    if not merged.keys() & {"model", "checkpoint_path", "models", "gcs_bucket"}:
        raise BadRequest(
            f"{file.path} is a Levanter training config and names no weights. Give --checkpoint-path or "
            "--hf-checkpoint.",
            param="checkpoint_path",
        )
    dtype, device = merged.get("dtype"), merged.get("device", Given("auto", "default"))
    is_its_own = dtype is not None and dtype is file.settings.get("dtype") and dtype.value != "float32"
    if dtype is None or not is_its_own or dtype.value in backend_here(str(device.value)).dtypes:
        return ()
    del merged["dtype"]
    return (f"{dtype.origin} asks for {dtype.value}, which needs a GPU: the CPU computes in its own precision.",)


def _is_ours(key: object) -> bool:
    """Whether a key of a YAML file's top level is a setting, or a section of settings."""
    name = str(key).replace("-", "_")
    return name in _SECTIONS or name in _known_keys()


def _known_keys() -> dict[str, str]:
    """Settings by the keys that a YAML file may call them."""
    known = {name: name for name in ServeSettings.model_fields}
    return known | {alias: name for name, names in ALIASES.items() for alias in names.yaml}


def _settings_in(content: object, path: Path) -> Iterable[tuple[str, str, object]]:
    """Of a file or a section of it: key, setting, value."""
    if content is None:
        return
    if not isinstance(content, dict):
        raise BadRequest(f"The config file {path} must hold settings, one a line, such as `port: 8000`.")
    known = _known_keys()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in _SECTIONS and isinstance(value, dict | None):
            yield from _settings_in(value, path)
        elif name in REFUSED:
            raise BadRequest(f"{path}: {key} cannot be honoured: {REFUSED[name]}")
        elif name in known:
            yield str(key), known[name], value
        else:
            close = difflib.get_close_matches(name, known, 1)
            cure = f"Did you mean {close[0]}?" if close else "docs/configuration.md lists them all."
            raise BadRequest(f"{path}: {key} is no setting. {cure}")


def _check_together(settings: ServeSettings) -> None:
    for name in settings.model_settings:
        settings.is_pinned(name)
        own = settings.of_model(name)
        try:
            own.engine()
        except BadRequest as error:
            raise _wrong_own(name, str(error)) from None
    if settings.max_bodies_size is not None and settings.max_bodies_size < settings.max_body_size:
        raise BadRequest(
            f"max_bodies_size ({settings.max_bodies_size}) is less than max_body_size ({settings.max_body_size}): the "
            "longest bodies would never find room. Raise the one or lower the other.",
            param="max_bodies_size",
        )
    if settings.enable_cors and settings.cors_credentials and "*" in settings.cors_origins:
        raise BadRequest(
            "cors_credentials needs origins by name: with * any page could act for your users. Set cors_origins."
        )
    if settings.any_model_name and settings.has_several:
        raise BadRequest(
            "any_model_name is for a server of one model: which of several is meant must be said. Leave it out, or "
            "give the first model more names with served_model_name.",
            param="any_model_name",
        )
    if not all(each.get_secret_value().isascii() for name in SECRETS for each in getattr(settings, name)):
        raise BadRequest("An API key travels in a header, so it must be plain ASCII. Choose another one.")


def _refusal(error: ErrorDetails, given: Mapping[str, Given]) -> BadRequest:
    name = str(error["loc"][0])
    origin, value = given[name].origin, given[name].value
    complaint = _complaint(error)
    if name == "port" and str(value).startswith("tcp://"):
        complaint = "Kubernetes sets this for a Service of that name; set enableServiceLinks: false in the pod"
    shown = "" if name in SECRETS else f" = {_short(value)}"
    return BadRequest(f"{name}{shown} ({origin}): {complaint}.", param=name)


def _complaint(error: ErrorDetails) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shown(value: object) -> str:
    """In YAML."""
    match value:
        case Path():
            return json.dumps(str(value))
        case tuple():
            return f"[{', '.join(_shown(each) for each in value)}]"
        case SecretStr():
            return '"***"'
        case _:
            return json.dumps(value)
