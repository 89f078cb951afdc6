"""Ostro serves language models: `LLM` in Python, `ostro` on the command line, `Client` for its servers."""

from importlib import import_module
from typing import TYPE_CHECKING

from ostro.config import EngineConfig
from ostro.errors import OstroError
from ostro.frontend.outputs import Choice, Completion, Delta, Score, Solution
from ostro.sampling_params import SamplingParams
from ostro.structured import StructuredOutput
from ostro.version import __version__ as __version__

if TYPE_CHECKING:
    from ostro.client.async_client import AsyncClient
    from ostro.client.client import Client
    from ostro.llm import LLM

__all__ = [
    "LLM",
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "EngineConfig",
    "OstroError",
    "SamplingParams",
    "Score",
    "Solution",
    "StructuredOutput",
]

# These import the tokenizer library or httpx, which `import ostro` and `ostro --help` do not need.
_LAZY = {"LLM": "ostro.llm", "Client": "ostro.client.client", "AsyncClient": "ostro.client.async_client"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'ostro' has no attribute {name!r}")
    found: object = getattr(import_module(_LAZY[name]), name)
    return found
