"""Structured outputs: what an answer must match, as a JSON schema, regex, choice or grammar. Knows no tokens and
compiles nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ostro.errors import BadRequest

MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Characters per schema, regex or grammar, or over all choices."""
MAX_CHOICES = 20_000

_TEXTS = ("json_schema", "regex", "grammar", "structural_tag")
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields of which exactly one is given."""
_WITH_JSON = frozenset({"json_schema", "json_object", "structural_tag"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Exactly one of the kinds, and how to enforce it. Raises BadRequest, which names the field at fault."""

    json_schema: str | None = None
    """JSON that validates against this schema, itself JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that the expression matches as a whole."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    grammar: str | None = None
    """Text that matches a grammar in Lark's notation or in GBNF."""
    structural_tag: str | None = None
    """Free text in which each begin tag is followed by JSON of its schema and by its end tag; given as JSON text."""
    strict: bool = True
    """Whether a schema that cannot be enforced exactly is refused. If not, what cannot be enforced is ignored."""
    whitespace_pattern: str | None = None
    """A regex for the whitespace between JSON's tokens, in place of the default: at most one space, or one or two line
    breaks with an indent. Empty for none."""
    jump_forward: bool = False
    """Whether tokens without an alternative are appended without being sampled, several in one step."""

    def __post_init__(self) -> None:
        for name in ("json_object", "strict", "jump_forward"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r}")
        for name in _TEXTS:
            _check_text(name, getattr(self, name))
        _check_text("whitespace_pattern", self.whitespace_pattern or None)
        object.__setattr__(self, "choice", _choices(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            raise BadRequest(f"Give exactly one of {', '.join(KINDS)}; got {named}.", param="structured")
        self._check_options()
        _check_json("json_schema", self.json_schema, dict | bool, "an object, true or false")
        _check_json("structural_tag", self.structural_tag, dict, "an object")

    @classmethod
    def from_schema(cls, schema: Mapping[str, object], *, strict: bool = True, jump_forward: bool = False) -> Self:
        """From a JSON schema as a Python mapping, such as a Pydantic model's `model_json_schema()`."""
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad("json_schema", f"must hold JSON values only ({error})") from error
        return cls(json_schema=text, strict=strict, jump_forward=jump_forward)

    @property
    def kind(self) -> str:
        """The name, in KINDS, of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))

    def _check_options(self) -> None:
        if self.whitespace_pattern is not None and self.kind not in _WITH_JSON:
            raise _bad("whitespace_pattern", f"is for JSON, and has no meaning with {self.kind}: leave it out")
        if not self.strict and self.kind not in ("json_schema", "structural_tag"):
            raise _bad("strict", f"is for JSON schemas, and has no meaning with {self.kind}: leave it out")


def _bad(name: str, what: str) -> BadRequest:
    return BadRequest(f"{name} {what}.", param=name)


def _check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise _bad(name, f"must be a non-empty string, got {value!r:.60}")
    if len(value) > MAX_GRAMMAR_CHARACTERS:
        raise _bad(name, f"takes at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(value)}")
    _check_characters(name, value)


def _check_characters(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad(name, "holds half a surrogate pair, which is not a character") from error


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _bad("choice", f"must be a list of strings, got {value!r:.60}")
    if len(value) > MAX_CHOICES:
        raise _bad("choice", f"takes at most {MAX_CHOICES} entries, got {len(value)}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise _bad("choice", f"must hold non-empty strings, got {text!r:.60}")
        _check_characters("choice", text)
    if (length := sum(map(len, value))) > MAX_GRAMMAR_CHARACTERS:
        raise _bad("choice", f"takes at most {MAX_GRAMMAR_CHARACTERS} characters over all entries, got {length}")
    return tuple(value)


def _check_json(name: str, text: str | None, kinds: type | object, form: str) -> None:
    if text is None:
        return
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise _bad(name, "is nested too deeply") from error
    except ValueError as error:
        raise _bad(name, f"is not JSON ({error})") from error
    if not isinstance(value, kinds):  # type: ignore[arg-type]
        raise _bad(name, f"must be {form}, got {value!r:.60}")
