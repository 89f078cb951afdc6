"""Names of settings: as flags, environment variables and YAML keys, here and in other servers."""

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "OSTRO_"


@dataclass(frozen=True, slots=True)
class Names:
    """Other names of a setting: as flags, environment variables and YAML keys."""

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
    # Its name until 0.2.
    "backend": Names(("--cpu-backend",), ("OSTRO_CPU_BACKEND",), ("cpu_backend",)),
    "hrm_num_heads": Names(("--num-heads",), (), ("num_heads",)),
    "hrm_h_cycles": Names(("--h-cycles",), (), ("h_cycles",)),
    "hrm_l_cycles": Names(("--l-cycles",), (), ("l_cycles",)),
    "hrm_h_layers": Names(("--h-layers",), (), ("h_layers",)),
    "hrm_l_layers": Names(("--l-layers",), (), ("l_layers",)),
    "tensor_parallel": Names(
        ("--tensor-parallel-size", "--trainer.model_axis_size", "--trainer.mesh.axes.model"),
        (),
        ("tensor_parallel_size",),
    ),
    "otlp_endpoint": Names(("--otlp-traces-endpoint",), (), ("otlp_traces_endpoint",)),
}

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
