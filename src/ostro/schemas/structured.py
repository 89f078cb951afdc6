"""Structured outputs as requests spell them: OpenAI's `response_format`, and the fields of vLLM, llama.cpp and SGLang.
All of them become one StructuredOutput.

Knows the spellings; `ostro.structured` defines their meaning, and `grammar` checks whether a schema can be enforced.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from ostro.errors import BadRequest
from ostro.schemas.wire import RequestModel, refusal, shape
from ostro.structured import KINDS, MAX_CHOICES, MAX_GRAMMAR_CHARACTERS, StructuredOutput

NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"
# A regex for the whitespace between JSON's tokens that matches none at all.
_NO_WHITESPACE = "(?:)"

# Names that `ostro.structured` and the compiler use in errors.
_OWN_NAMES = frozenset({*KINDS, "structured", "strict", "whitespace_pattern"})


@dataclass(frozen=True, slots=True)
class FormatSource:
    """The field of a request that defines its structured output, for errors."""

    param: str
    """The field, such as `response_format`."""
    subject: str
    """What it holds, in an error: `schema for response_format 'weather'`, `regex`."""

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Rewrites errors about the structured output to name the request's own field."""
        try:
            yield
        except BadRequest as error:
            if error.param is None or error.param.partition(".")[0] not in _OWN_NAMES:
                raise
            raise type(error)(f"Invalid {self.subject}: {error.message}", param=self.param) from error


SchemaObject = Annotated[
    dict[str, Any] | bool, shape("must be a JSON schema: an object"), WithJsonSchema({"type": "object"})
]
SchemaText = Annotated[
    dict[str, Any] | bool | str,
    shape("must be a JSON schema: an object, or its JSON text"),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class NamedSchema(RequestModel):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """1 to 64 letters, digits, `_` and `-`."""
    json_schema: Annotated[SchemaObject, Field(alias="schema")]
    description: str | None = None
    """Accepted, but not used: templates have no place for it."""
    strict: bool = False
    """Whether a schema that cannot be enforced exactly is refused. If not, what cannot be enforced is ignored."""


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    """Only with the type json_schema."""
    schema_of_object: Annotated[SchemaObject | None, Field(alias="schema")] = None
    """Only with the type json_object: what the object must look like."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    """With structures, only with the type structural_tag."""

    _ALLOWED: ClassVar[Mapping[str, frozenset[str]]] = {
        "text": frozenset(),
        "json_object": frozenset({"schema_of_object"}),
        "json_schema": frozenset({"json_schema"}),
        "structural_tag": frozenset({"structures", "triggers"}),
    }

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        names = {name: field.alias or name for name, field in type(self).model_fields.items()}
        for name in self.model_fields_set - {"type"} - self._ALLOWED[self.type]:
            raise refusal(names[name], f"has no place in a response_format of type {self.type}: leave it out")
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("json_schema", 'is required with {"type": "json_schema"}')
        return self

    def output(self, options: "_Options") -> tuple[FormatSource, StructuredOutput] | None:
        param = "response_format"
        if self.json_schema is not None:
            source = FormatSource(param, f"schema for response_format '{self.json_schema.name}'")
            strict = self.json_schema.strict
            return _made(source, options, json_schema=_text(self.json_schema.json_schema), strict=strict)
        if self.schema_of_object is not None:
            source = FormatSource(param, "schema for response_format")
            return _made(source, options, json_schema=_text(self.schema_of_object), strict=False)
        if self.type == "json_object":
            return _made(FormatSource(param, "response_format"), options, json_object=True)
        if self.type == "structural_tag":
            tag = {"structures": self.structures, "triggers": self.triggers}
            return _made(FormatSource(param, "structural tag"), options, structural_tag=json.dumps(tag))
        return None


class StructuredOutputs(RequestModel):
    """vLLM's: exactly one of json, json_object, regex, choice, grammar and structural_tag."""

    ignored: ClassVar[frozenset[str]] = frozenset({"disable_fallback"})
    unserved: ClassVar[dict[str, tuple[object, ...]]] = {"disable_additional_properties": (False,)}

    json_schema: Annotated[SchemaText | None, Field(alias="json")] = None
    json_object: bool = False
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    """In Lark's notation or in GBNF."""
    structural_tag: SchemaText | None = None
    whitespace_pattern: Annotated[str, Field(min_length=1)] | None = None
    """A regex for the white space between JSON's tokens."""
    disable_any_whitespace: bool = False
    strict: bool | None = None
    """false: what cannot be enforced of a schema is ignored, rather than refused."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        kinds = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in kinds if getattr(self, name) not in (None, False)]
        names = ["json" if name == "json_schema" else name for name in given]
        if not names:
            raise refusal("json", "or one of json_object, regex, choice, grammar and structural_tag is required")
        if len(names) > 1:
            raise refusal(names[1], f"contradicts {names[0]}: give only one of them")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise refusal("whitespace_pattern", "contradicts disable_any_whitespace: give only one of them")
        return self

    def output(self, options: "_Options") -> tuple[FormatSource, StructuredOutput]:
        whitespace = _NO_WHITESPACE if self.disable_any_whitespace else self.whitespace_pattern
        options = options | ({} if whitespace is None else {"whitespace_pattern": whitespace})
        options = options | ({} if self.strict is None else {"strict": self.strict})
        given: dict[str, object]
        if self.json_schema is not None:
            name, given = "json", {"json_schema": _text(self.json_schema)}
        elif self.structural_tag is not None:
            name, given = "structural_tag", {"structural_tag": _text(self.structural_tag)}
        elif self.choice is not None:
            name, given = "choice", {"choice": tuple(self.choice)}
        elif self.json_object:
            name, given = "json_object", {"json_object": True}
        else:
            name = "regex" if self.regex is not None else "grammar"
            given = {name: getattr(self, name)}
        return _made(FormatSource(f"structured_outputs.{name}", _SUBJECTS[name]), options, **given)


class StructuredFields(RequestModel):
    """A request's fields for structured outputs; at most one may define the format."""

    response_format: ResponseFormat | None = None
    """OpenAI's: text, json_object, or json_schema with a schema, strict or not; or vLLM's structural_tag."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's: one of json, json_object, regex, choice, grammar and structural_tag."""
    guided_json: SchemaText | None = None
    """vLLM's older name for structured_outputs.json; the next three likewise."""
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    grammar: GrammarText | None = None
    """llama.cpp's: a grammar in GBNF, or in Lark's notation."""
    json_schema: SchemaText | None = None
    """llama.cpp's and SGLang's: a JSON schema, as an object or as its text."""
    regex: GrammarText | None = None
    """SGLang's: a regular expression that the whole output matches."""
    ebnf: GrammarText | None = None
    """SGLang's name for grammar."""
    jump_forward: bool = False
    """Tokens without an alternative are appended without being sampled, several in one step. JSON is then written with
    `, ` and `: ` between its parts."""

    @property
    def format_source(self) -> FormatSource | None:
        """The field that defines the structured output; None if there is none."""
        asked = self._asked()
        return None if asked is None else asked[0]

    @property
    def structured(self) -> StructuredOutput | None:
        """Raises BadRequest that names the field at fault."""
        asked = self._asked()
        return None if asked is None else asked[1]

    @model_validator(mode="after")
    def _check_one_format(self) -> Self:
        given = [name for name in _SPELLINGS if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        if len(given) > 1:
            raise refusal(
                given[1], f"contradicts {given[0]}: both say what the output must look like, so give only one of them"
            )
        return self

    def _asked(self) -> tuple[FormatSource, StructuredOutput] | None:
        options: _Options = {"jump_forward": True} if self.jump_forward else {}
        if self.response_format is not None and (asked := self.response_format.output(options)):
            return asked
        if self.structured_outputs is not None:
            return self.structured_outputs.output(options)
        for name, kind in _PLAIN.items():
            if (value := getattr(self, name)) is not None:
                given = _text(value) if kind == "json_schema" else tuple(value) if kind == "choice" else value
                return _made(FormatSource(name, _SUBJECTS[kind]), options, **{kind: given})
        return None


_Options = dict[str, Any]

# Fields that hold a plain value, and its kind.
_PLAIN = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}
_SPELLINGS = ("response_format", "structured_outputs", *_PLAIN)
_SUBJECTS = {
    "json": "schema",
    "json_schema": "schema",
    "json_object": "structured output",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def _made(source: FormatSource, options: _Options, **given: Any) -> tuple[FormatSource, StructuredOutput]:
    with source.named_in_errors():
        return source, StructuredOutput(**(options | given))


def _text(schema: Mapping[str, object] | bool | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
