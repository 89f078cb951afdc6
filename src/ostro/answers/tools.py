"""A request's settings for tools and reasoning, independent of the dialect."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ostro.errors import BadRequest

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, which models see as a function that takes a string."""

ANY_OBJECT: Mapping[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, or a custom tool, which takes text."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """JSON schema of a function's arguments. None if it takes none."""
    strict: bool = False
    """Whether a schema that cannot be enforced exactly is refused."""
    enforced: Mapping[str, object] | None = None
    """The schema that is enforced in place of `parameters`: the part of it that can be."""
    is_custom: bool = False
    regex: str | None = None
    """Regex that must match a custom tool's whole input."""
    grammar: str | None = None
    """Grammar of a custom tool's input, in Lark's notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether tools are called: never, if the model decides to, at least once, or exactly once by name."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    """The tool that is called, if the mode is `named`."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None for all. The others are still shown to the model."""

    def __post_init__(self) -> None:
        if (self.mode == "named") != (self.name is not None):
            raise BadRequest("A named tool choice needs a name, and other choices take none.", param="tool_choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSettings:
    enabled: bool | None = None
    """Whether to reason; None leaves it to the template, or to `effort`."""
    effort: str | None = None
    """Reasoning effort, from none to max. Passed to templates that read it; `none` turns reasoning off."""
    budget: int | None = None
    """Tokens after which the reasoning is ended."""
    include: bool = True
    """Whether the reasoning is part of the answer."""
