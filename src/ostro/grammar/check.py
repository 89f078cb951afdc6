"""Finds out whether a structured output can be enforced, by compiling it. Runs in `check_process`: nothing here limits
the time and memory that compiling takes.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, OstroError, Unsupported
from ostro.formats.guidance_text import SpecialIds
from ostro.grammar.compiler import NotCompiled, compile_grammar
from ostro.grammar.exactness import not_exact
from ostro.grammar.schema import Path, check_depth, lint, locate, pointer
from ostro.grammar.translate import prepared_schema, schema_grammar, translate
from ostro.structured import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MAX_LEFT_OUT = 32
"""How many keywords may be dropped from a lenient schema, besides those that the library ignores by itself."""


def check_structured(structured: StructuredOutput, special_ids: SpecialIds, tokenizer: "LLTokenizer") -> Constraint:
    """The constraint for the engine. Raises BadRequest that names the keyword and its place."""
    if structured.json_schema is not None and not structured.strict:
        return _lenient(structured, tokenizer)
    constraint = translate(structured, special_ids)
    try:
        compile_grammar(tokenizer, constraint)
    except NotCompiled as failure:
        raise _explained(failure, structured) from failure
    return constraint


def check_constraint(constraint: Constraint, tokenizer: "LLTokenizer") -> None:
    """Checks a grammar that was built elsewhere, such as from a request's tools. Raises BadRequest if it is refused."""
    schemas = list(_inline_schemas(constraint.grammar))
    for schema in schemas:
        check_depth(schema, "A schema")
        lint(schema, "A schema")
    try:
        compile_grammar(tokenizer, constraint)
    except NotCompiled as failure:
        for schema in schemas:
            if path := locate(failure.error, schema):
                raise Unsupported(
                    f"A schema cannot be enforced exactly: {path[-1]} at {pointer(path)} is not supported "
                    f"({failure.reason}). Leave it out, or set strict to false to have it ignored."
                ) from failure
        raise BadRequest(failure.message) from failure


def _inline_schemas(grammar: str) -> Iterator[dict[str, Any]]:
    """The schemas inside a grammar in Lark's notation."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, match.end())
        except (ValueError, RecursionError):
            # The compiler reports what is wrong with it.
            continue
        if isinstance(schema, dict):
            yield schema


def _lenient(structured: StructuredOutput, tokenizer: "LLTokenizer") -> Constraint:
    """Like `check_structured`, dropping the keywords that the library can neither enforce nor ignore."""
    schema = prepared_schema(structured.json_schema or "", structured, "json_schema")
    for _ in range(_MAX_LEFT_OUT):
        constraint = Constraint(grammar=schema_grammar(schema), jump_forward=structured.jump_forward)
        try:
            compile_grammar(tokenizer, constraint)
        except NotCompiled as failure:
            path = locate(failure.error, schema)
            if path is None or path[-1] not in _IGNORABLE:
                raise _explained(failure, structured) from failure
            _leave_out(schema, path)
        else:
            return constraint
    raise BadRequest(
        f"json_schema has more than {_MAX_LEFT_OUT} keywords that cannot be enforced. Simplify it.", param="json_schema"
    )


_IGNORABLE = frozenset({"$ref", "maxProperties", "minProperties", "oneOf", "pattern", "patternProperties"})


def _leave_out(schema: dict[str, Any], path: Path) -> None:
    parent: Any = schema
    for part in path[:-1]:
        parent = parent[part]
    del parent[path[-1]]
    if path[-1] == "patternProperties":
        # Otherwise properties that the patterns allowed would be refused.
        parent.pop("additionalProperties", None)


def _explained(failure: NotCompiled, structured: StructuredOutput) -> OstroError:
    param = structured.kind
    place = _place(failure, structured)
    if place is None:
        return BadRequest(f"{param} cannot be compiled: {failure.reason}.", param=param)
    where, keyword = place
    if keyword in _MISTAKES:
        return BadRequest(f"{param} is not valid at {where}: {failure.reason}.", param=param)
    if not structured.strict:
        return Unsupported(
            f"{param} cannot be enforced: {keyword} at {where} is not supported ({failure.reason}). Leave it out.",
            param=param,
        )
    return not_exact(param, keyword, where, failure.reason)


_MISTAKES = frozenset({"type", "$ref"})


def _place(failure: NotCompiled, structured: StructuredOutput) -> tuple[str, str] | None:
    """The keyword that cannot be enforced: its location and its name."""
    schemas: dict[str, Any] = {}
    if structured.json_schema is not None:
        schemas = {"": json.loads(structured.json_schema)}
    elif structured.structural_tag is not None:
        tags = json.loads(structured.structural_tag)["structures"]
        schemas = {f"structures[{index}].schema": tag.get("schema") for index, tag in enumerate(tags)}
    for place, schema in schemas.items():
        if isinstance(schema, dict) and (path := locate(failure.error, schema)):
            return place + pointer(path), str(path[-1])
    return None
