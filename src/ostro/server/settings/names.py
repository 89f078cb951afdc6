"""Names of settings: as flags, environment variables and YAML keys, here and in other servers."""

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "OSTRO_"


@dataclass(frozen=True, slots=True)
class Names:
    """Other names of a setting."""

    also: tuple[str, ...] = ()
    """Used like its own name: `max_model_len` in YAML, --max-model-len and OSTRO_MAX_MODEL_LEN."""
    levanter: tuple[str, ...] = ()
    """Keys in sections of Levanter's config: --service.max_seqs and OSTRO_SERVICE_MAX_SEQS."""
    foreign: tuple[str, ...] = ()
    """Environment variables of other servers."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*("--" + name.replace("_", "-") for name in self.also), *("--" + key for key in self.levanter))

    @property
    def env(self) -> tuple[str, ...]:
        ours = (PREFIX + name.replace(".", "_").upper() for name in (*self.also, *self.levanter))
        return (*ours, *self.foreign)


ALIASES: Mapping[str, Names] = {
    "model": Names(("hf_checkpoint", "model_path", "model_name_or_path"), foreign=("AIOS_MODEL_PATH",)),
    "levanter_config": Names(("model_config",)),
    "max_models": Names(("max_cached_models",), foreign=("MAX_CACHED_MODELS",)),
    "gcs_bucket": Names(foreign=("GCS_BUCKET",)),
    "gcs_model_prefix": Names(foreign=("GCS_MODEL_PREFIX",)),
    "local_dev": Names(foreign=("LOCAL_DEV",)),
    "default_max_tokens": Names(foreign=("DEFAULT_MAX_TOKENS",)),
    "default_temperature": Names(("temperature",), foreign=("DEFAULT_TEMPERATURE",)),
    "served_model_name": Names(("model_name",)),
    "dtype": Names(levanter=("trainer.mp",)),
    "seed": Names(levanter=("service.seed",)),
    "page_size": Names(levanter=("service.page_size",)),
    "gpu_memory_utilization": Names(levanter=("service.hbm_utilization",)),
    "tokenizer": Names(("tokenizer_path",), foreign=("AIOS_TOKENIZER_PATH",)),
    "max_seq_len": Names(("max_context_length", "context_window", "max_model_len"), ("service.max_seq_len",)),
    "max_batch_seqs": Names(("max_batch_size", "max_num_seqs"), ("service.max_seqs",), ("AIOS_MAX_BATCH_SIZE",)),
    "max_batch_tokens": Names(("max_num_batched_tokens",), ("service.max_tokens_per_round",)),
    "pages_per_seq": Names(("max_pages_per_seq",), ("service.max_pages_per_seq",)),
    "port": Names(foreign=("PORT",)),
    "api_key": Names(foreign=("LEVANTER_API_KEY",)),
    "request_timeout": Names(foreign=("REQUEST_TIMEOUT",)),
    "max_new_tokens": Names(foreign=("AIOS_MAX_NEW_TOKENS",)),
    "max_concurrent_requests": Names(foreign=("MAX_CONCURRENT_REQUESTS",)),
    "cors_origins": Names(foreign=("AIOS_CORS_ORIGINS",)),
    "cors_credentials": Names(("allow_credentials",)),
    "device": Names(foreign=("AIOS_DEVICE",)),
    # Its name until 0.2.
    "backend": Names(("cpu_backend",)),
    "hrm_num_heads": Names(("num_heads",)),
    "hrm_h_cycles": Names(("h_cycles",)),
    "hrm_l_cycles": Names(("l_cycles",)),
    "hrm_h_layers": Names(("h_layers",)),
    "hrm_l_layers": Names(("l_layers",)),
    "tensor_parallel": Names(("tensor_parallel_size",), ("trainer.model_axis_size", "trainer.mesh.axes.model")),
    "otlp_endpoint": Names(("otlp_traces_endpoint",)),
}


def variables_of(name: str) -> tuple[str, ...]:
    """The environment variables of a setting; the first one present counts."""
    return (PREFIX + name.upper(), *ALIASES.get(name, Names()).env)


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
REPEATABLE = frozenset({"model", "models", "lora", "served_model_name"})
ONLY_IN_FILES = frozenset({"model_settings"})
