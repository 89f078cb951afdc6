"""The environment variables that a subprocess gets: only those it needs, by name. Starts nothing.

A server's environment contains secrets, including its own API keys. An engine runs native code on foreign files, a chat
template is a stranger's program, and a download talks to strangers: none of them gets a secret that it does not need.
Only the variables listed here are passed on.
"""

import os
from collections.abc import Mapping
from typing import Final

# Used by the interpreter and the C library.
_INTERPRETER: Final = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TZ", "VIRTUAL_ENV")
# For any subprocess: directories, locale, Python, and settings of libraries and tools.
_SYSTEM: Final = (
    *("HOME", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TZ", "USER"),
    *("TMPDIR", "TEMP", "TMP", "XDG_*", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "COVERAGE_*"),
    *("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TQDM_*"),
    *("LD_*", "DYLD_*", "GLIBC_TUNABLES", "MALLOC_*", "ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
    *("SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT", "APPDATA", "LOCALAPPDATA", "USERPROFILE", "PROGRAMDATA"),
)
_CACHES: Final = (
    *("OSTRO_CACHE", "OSTRO_CACHE_LIMIT", "LOCAL_MODEL_CACHE", "OSTRO_FAULTS", "OSTRO_NATIVE_*"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_*"),
)
# Threads, GPUs, compilers.
_DEVICES: Final = (
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*", "DNNL_*", "ONEDNN_*", "BLIS_*"),
    *("CUDA*", "NVIDIA_*", "NCCL_*", "CUBLAS_*", "CUDNN_*", "GPU_*", "HIP_*", "ROCR_*", "ROCM_*", "HSA_*"),
    *(
        "JAX_*",
        "XLA_*",
        "LIBTPU_*",
        "TPU_*",
        "TORCH*",
        "PYTORCH_*",
        "TRITON_*",
        "CC",
        "CXX",
        "CPATH",
        "C_INCLUDE_PATH",
        "LIBRARY_PATH",
    ),
)
# Proxies, certificates, and credentials for model sources.
_NETWORK: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"),
    *("HF_*", "HUGGING_FACE_*", "HUGGINGFACE_*", "PIP_*"),
    *("AWS_*", "BOTO_CONFIG", "GOOGLE_*", "GCS_*", "GCLOUD_*", "GCE_*", "NO_GCE_CHECK", "CLOUDSDK_*"),
    *("STORAGE_EMULATOR_HOST", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "K_SERVICE"),
)

_ENGINE: Final = (*_SYSTEM, *_CACHES, *_DEVICES)


def template_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that renders chat templates."""
    return _allowed(environ, _INTERPRETER)


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that runs a model from local files."""
    return _allowed(environ, _ENGINE)


def download_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process that downloads models, and may run one."""
    return _allowed(environ, (*_ENGINE, *_NETWORK))


def _allowed(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    exact = frozenset(names)
    prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
    return {name: value for name, value in environ.items() if name in exact or name.startswith(prefixes)}
