"""Defaults for what a request leaves out: a model's recommended sampling settings. Knows no text and no tensors."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ostro.errors import BadRequest
from ostro.sampling_params import NEUTRAL, SamplingParams

_log = logging.getLogger(__name__)

# Our name -> the name in generation_config.json.
_THEIRS = {name: name for name in NEUTRAL} | {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """A field that is None sets no default. One outside its range raises BadRequest, as in SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """Limit for requests that set none of their own."""

    def __post_init__(self) -> None:
        self.fill(SamplingParams(max_tokens=None))

    @classmethod
    def read(cls, generation_config: Mapping[str, object], *, source: str) -> Self:
        """Reads the contents of a generation_config.json. A value out of range is skipped and logged.

        `do_sample: false` means greedy decoding whatever else the file says about sampling, as in transformers. If the
        key is missing, a temperature in the file counts, as in vLLM.
        """
        found: dict[str, object] = {}
        for name, theirs in _THEIRS.items():
            value = generation_config.get(theirs)
            try:
                cls(**{name: value})  # type: ignore[arg-type]
            except BadRequest:
                _log.warning("%s: %s = %.60r is out of range and not used as a default.", source, theirs, value)
            else:
                found[name] = value
        if generation_config.get("do_sample") is False:
            found |= dict.fromkeys(("top_p", "top_k", "min_p")) | {"temperature": 0.0}
        return cls(**found)  # type: ignore[arg-type]

    @property
    def given(self) -> dict[str, float | int]:
        """The fields that are set."""
        return {name: value for name in _THEIRS if (value := getattr(self, name)) is not None}

    def over(self, other: "SamplingDefaults") -> "SamplingDefaults":
        """These defaults, with the other's for those that are not set."""
        return SamplingDefaults(**(other.given | self.given))  # type: ignore[arg-type]

    def capped(self, most: int | None) -> "SamplingDefaults":
        """The same, with max_tokens at most `most` if that is not None."""
        if most is None or (self.max_tokens is not None and self.max_tokens <= most):
            return self
        return replace(self, max_tokens=most)

    def fill(self, params: SamplingParams) -> SamplingParams:
        """The params, with these defaults for what they leave out."""
        changes: dict[str, object] = {name: value for name, value in self.given.items() if name in params.unset}
        if params.max_tokens is None and params.default_max_tokens is None:
            changes["default_max_tokens"] = self.max_tokens
        return params.with_changes(**changes) if changes else params
