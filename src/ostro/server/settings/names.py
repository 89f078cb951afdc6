"""Names of settings: as flags, environment variables and YAML keys, here and in other servers."""

from collections.abc import Mapping

from ostro.config import PREFIX, SETTINGS, Names
from ostro.system.env_file import CACHE_VARIABLES

ALIASES: Mapping[str, Names] = {name: each.names for name, each in SETTINGS.items() if each.names != Names()} | {
    "levanter_config": Names(("model_config",)),
    "max_models": Names(("max_cached_models",), foreign=("MAX_CACHED_MODELS",)),
    "gcs_bucket": Names(foreign=("GCS_BUCKET",)),
    "gcs_model_prefix": Names(foreign=("GCS_MODEL_PREFIX",)),
    "local_dev": Names(foreign=("LOCAL_DEV",)),
    "default_max_tokens": Names(foreign=("DEFAULT_MAX_TOKENS",)),
    "default_temperature": Names(("temperature",), foreign=("DEFAULT_TEMPERATURE",)),
    "served_model_name": Names(("model_name",)),
    "seed": Names(levanter=("service.seed",)),
    "port": Names(foreign=("PORT",)),
    "api_key": Names(foreign=("LEVANTER_API_KEY",)),
    "request_timeout": Names(foreign=("REQUEST_TIMEOUT",)),
    "max_new_tokens": Names(foreign=("AIOS_MAX_NEW_TOKENS",)),
    "max_concurrent_requests": Names(foreign=("MAX_CONCURRENT_REQUESTS",)),
    "cors_origins": Names(foreign=("AIOS_CORS_ORIGINS",)),
    "cors_credentials": Names(("allow_credentials",)),
    "otlp_endpoint": Names(("otlp_traces_endpoint",)),
}


def variables_of(name: str) -> tuple[str, ...]:
    """The environment variables of a setting; the first one present counts."""
    return (PREFIX + name.upper(), *ALIASES.get(name, Names()).env)


CONFIG_VARIABLE = PREFIX + "CONFIG"
# Variables that begin like settings but are not, grouped by their reader.
NOT_SETTINGS = frozenset(
    {
        *(CONFIG_VARIABLE, *CACHE_VARIABLES),
        *("OSTRO_COMPARE_KEY_A", "OSTRO_COMPARE_KEY_B"),
        # The native core and its build; tests of engines that fail.
        *("OSTRO_NATIVE_LIBRARY", "OSTRO_NATIVE_REQUIRED", "OSTRO_NATIVE_ISA", "OSTRO_FAULTS"),
        # compose.yaml, whose .env may be passed to the container as a whole, and scripts/run_server.sh.
        *("OSTRO_MODELS_DIR", "OSTRO_PUBLISHED_PORT", "OSTRO_VENV"),
        # Benchmarks and tests, which start servers.
        *("OSTRO_BENCH_BEGAN", "OSTRO_VOCAB_DIR"),
    }
)
RAY_PREFIX = PREFIX + "RAY_"
"""Prefix of a cluster's settings, which `ray.options` reads."""

# Settings of other servers that this build refuses by name, with the reason.
REFUSED: Mapping[str, str] = {
    "trust_remote_code": "code that comes with a model is never run. Leave it out.",
}
# The first setting of each group, in class order: for the help and the docs.
GROUPS: Mapping[str, str] = {
    "model": "Models",
    "role": "Prefill and decode",
    "tokenizer": "Engine",
    "hrm_dialect": "HRM models",
    "threads": "Device and precision",
    "served_model_name": "Network",
    "api_key": "Access",
    "max_concurrent_requests": "Limits",
    "log_level": "Logging",
}
SECRETS = ("api_key", "priority_key", "admin_key", "prefill_key")
REPEATABLE = frozenset({"model", "models", "lora", "served_model_name", "model_alias"})
ONLY_IN_FILES = frozenset({"model_settings"})

# The section of Levanter's config that is about its engine: its names in the server's config and in the sampler's.
_ENGINE, ENGINE_SECTIONS = "service", ("service", "engine")

# Why a key of Levanter's config is refused and what to write instead: by key, or by section.
_INSTEAD: Mapping[str, str] = {
    "service.max_pages": "write --max-running-tokens, which is max_pages times page_size",
    "service.max_queued_tokens": "prompt tokens that may wait are bounded by --max-queue-tokens",
    "trainer.tensor_parallel_axes": "heads, MLPs and the vocabulary are divided over --tensor-parallel devices",
    "trainer.mesh": "of the mesh, only trainer.mesh.axes.model is used: the number of devices, --tensor-parallel",
    "trainer": "a server does not train; leave it out. Of the trainer's settings it takes trainer.mp and "
    "trainer.mesh.axes.model",
    "model": "a model's shape comes with its checkpoint or, for a Levanter model, from the YAML file it was trained "
    "with: --model-config FILE",
    "service": "there is no such setting. docs/configuration.md lists them all",
    "optimizer": "a server does not train; leave it out",
    "data": "a server does not train; leave it out. The tokenizer is --tokenizer",
}


def is_levanter_section(name: str) -> bool:
    return name in _INSTEAD or name in ENGINE_SECTIONS


def levanter_key(key: str) -> str:
    """A key in a section of Levanter's config, with the engine's section under one name."""
    section, dot, rest = key.partition(".")
    return f"{_ENGINE}.{rest}" if dot and section in ENGINE_SECTIONS else key


def of_levanter(key: str) -> str | None:
    """The setting that a key in a section of Levanter's config means; None if it means none."""
    key = levanter_key(key)
    return next((name for name, names in ALIASES.items() if key in names.levanter), None)


def why_not_served(key: str) -> str | None:
    """Why such a key is refused; None if it is not one of Levanter's."""
    key = levanter_key(key)
    known = [each for each in _INSTEAD if key == each or key.startswith(f"{each}.")]
    return _INSTEAD[max(known, key=len)] if known else None
