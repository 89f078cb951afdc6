"""Ostro serves language models: `LLM` in Python, `ostro` on the command line."""

from typing import TYPE_CHECKING

from ostro.config import EngineConfig
from ostro.errors import OstroError
from ostro.outputs import Choice, Completion, Delta, Score
from ostro.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ostro.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Choice", "Completion", "Delta", "EngineConfig", "OstroError", "SamplingParams", "Score"]


def __getattr__(name: str) -> object:
    # LLM brings the tokenizer library with it; `import ostro` and `ostro --help` do not need it.
    if name == "LLM":
        from ostro.llm import LLM

        return LLM
    raise AttributeError(f"module 'ostro' has no attribute {name!r}")
