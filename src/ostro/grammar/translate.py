"""Translates a structured output into a grammar for llguidance. Compiles nothing, and knows nothing of the model but
its special tokens.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, Unsupported
from ostro.formats.guidance_text import (
    OPTIONS,
    SEPARATORS,
    WHITESPACE,
    SpecialIds,
    marked_text,
    regex_literal,
    text_literal,
)
from ostro.grammar.exactness import leave_out_inexact, replace_exclusive_one_of, require_exact, takes_names_twice
from ostro.grammar.gbnf import is_gbnf, to_lark
from ostro.grammar.schema import Schema, check_depth, check_repetitions, lint, normalized
from ostro.structured import StructuredOutput

_START = "start: "

# Escapes allowed in strings, without \u: only rare control characters need it. A schema that contains such a character
# itself allows all escapes.
_PLAIN_ESCAPES = 'nrbtf\\"'
_ESCAPED = re.compile(r"\\u00[01]|\\u007f|\\x[01]|\\x7f|\x7f", re.IGNORECASE)

# Rule options that masks alone cannot implement.
_RULE_OPTION = re.compile(
    r"(?m)^[^\S\n]*+\w++\s*+\[[^\]\n]*\b(max_tokens|temperature|stop|stop_capture|suffix_capture)\s*+="
)


def translate(structured: StructuredOutput, special_ids: SpecialIds) -> Constraint:
    """Raises BadRequest if it exceeds a limit or is malformed, though many mistakes are only found by the compiler."""
    grammar = _TRANSLATORS[structured.kind](structured, special_ids)
    return Constraint(
        grammar=grammar,
        # Special tokens may occur in the text around tags.
        lazy=structured.structural_tag is not None,
        jump_forward=structured.jump_forward,
        is_users=structured.kind in ("regex", "grammar"),
    )


def prepared_schema(text: str, structured: StructuredOutput, param: str) -> Schema:
    """The normalised schema with llguidance's options for the request. Raises BadRequest if it exceeds a limit."""
    schema = json.loads(text)
    check_depth(schema, param)
    if schema is False:
        raise BadRequest(f"{param} is false: no JSON satisfies it.", param=param)
    made = normalized({} if schema is True else schema)
    lint(made, param)
    replace_exclusive_one_of(made)
    options = _json_options(structured)
    if structured.strict:
        require_exact(made, param)
        if takes_names_twice(made) and not _ESCAPED.search(text):
            options["json_allowed_escapes"] = _PLAIN_ESCAPES
    else:
        leave_out_inexact(made)
    return {**made, OPTIONS: options}


def schema_grammar(schema: Schema) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False)


def schema_of(constraint: Constraint) -> Schema:
    """The inverse of `schema_grammar`: the schema as it is enforced, with the library's options."""
    schema: Schema = json.loads(constraint.grammar)["grammars"][0]["json_schema"]
    return schema


def rule_of(structured: StructuredOutput, constraint: Constraint) -> str | None:
    """The constraint as the body of a rule in Lark's notation; None if it needs a grammar of its own."""
    if structured.json_schema is not None or structured.json_object:
        return f"%json {json.dumps(schema_of(constraint), ensure_ascii=False)}"
    if structured.regex is not None or structured.choice:
        return constraint.grammar.removeprefix(_START)
    return None


def _json_options(structured: StructuredOutput) -> dict[str, object]:
    made: dict[str, object] = {} if structured.strict else {"lenient": True}
    if structured.whitespace_pattern == "":
        return {**made, "whitespace_flexible": False}
    if structured.whitespace_pattern is not None:
        return {**made, "whitespace_pattern": structured.whitespace_pattern}
    if structured.jump_forward:
        return {**made, **SEPARATORS}
    return {**made, "whitespace_pattern": WHITESPACE}


def _json_schema(structured: StructuredOutput, _: SpecialIds) -> str:
    return schema_grammar(prepared_schema(structured.json_schema or "", structured, "json_schema"))


def _json_object(structured: StructuredOutput, _: SpecialIds) -> str:
    return schema_grammar({"type": "object", OPTIONS: _json_options(structured)})


def _regex(structured: StructuredOutput, _: SpecialIds) -> str:
    regex = structured.regex or ""
    check_repetitions(regex, "regex")
    return f"{_START}{regex_literal(regex)}"


def _choice(structured: StructuredOutput, _: SpecialIds) -> str:
    return _START + " | ".join(map(text_literal, structured.choice))


def _grammar(structured: StructuredOutput, _: SpecialIds) -> str:
    grammar = structured.grammar or ""
    check_repetitions(grammar, "grammar")
    if is_gbnf(grammar):
        return to_lark(grammar)
    if grammar.lstrip().startswith("{"):
        raise BadRequest(
            "grammar must be in Lark's notation, with a rule start, or in GBNF, with a rule root. Give a JSON schema "
            "as json_schema.",
            param="grammar",
        )
    if match := _RULE_OPTION.search(grammar):
        raise Unsupported(
            f"grammar sets {match[1]} for a rule, which is not supported. Leave it out, and give it for the whole "
            "request if it has one.",
            param="grammar",
        )
    return grammar


def _structural_tag(structured: StructuredOutput, special_ids: SpecialIds) -> str:
    """Free text in which each trigger must be followed by the rest of a begin tag, JSON, and the end tag."""
    tags = json.loads(structured.structural_tag or "{}")
    check_depth(tags, "structural_tag")
    if tags.get("type") == "structural_tag" or "format" in tags:
        raise Unsupported(
            "structural_tag takes the keys structures and triggers; the form with a format is not supported.",
            param="structural_tag",
        )
    triggers, structures = tags.get("triggers"), tags.get("structures")
    if not _are_texts(triggers) or not isinstance(structures, list) or not structures:
        raise BadRequest(
            "structural_tag needs structures, a list of objects with begin, schema and end, and triggers, a list of "
            "texts with which the begin tags start.",
            param="structural_tag",
        )
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for index, each in enumerate(structures):
        trigger, body = _tag(each, index, triggers, structured, special_ids)
        bodies[trigger].append(body)
    return _tags_grammar({trigger: body for trigger, body in bodies.items() if body}, special_ids)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)


def _tag(
    tag: Any, index: int, triggers: list[str], structured: StructuredOutput, special_ids: SpecialIds
) -> tuple[str, str]:
    """The tag's trigger, and the rule for what follows it."""
    place = f"structural_tag.structures[{index}]"
    if not isinstance(tag, dict) or not all(isinstance(tag.get(name), str) for name in ("begin", "end")):
        raise BadRequest(f"{place} needs the texts begin and end.", param="structural_tag")
    trigger = next((each for each in triggers if tag["begin"].startswith(each)), None)
    if trigger is None:
        raise BadRequest(f"{place}.begin starts with none of the triggers.", param="structural_tag")
    text = json.dumps(tag.get("schema", True))
    schema = json.dumps(prepared_schema(text, structured, f"{place}.schema"), ensure_ascii=False)
    begin = marked_text(tag["begin"][len(trigger) :], special_ids)
    return trigger, f"{begin} %json {schema} {marked_text(tag['end'], special_ids)}"


def _tags_grammar(bodies: Mapping[str, list[str]], special_ids: SpecialIds) -> str:
    lines = ["%llguidance {}", f"start: ({' | '.join(f'tag{n}' for n in range(len(bodies)))})* rest", "rest: TEXT"]
    lines.append(r"TEXT: /(.|\n)*/")
    for number, (trigger, alternatives) in enumerate(bodies.items()):
        if trigger in special_ids:
            head = f"TEXT {marked_text(trigger, special_ids)}"
        else:
            # Lazy: the text ends at the first trigger.
            head = f"head{number}"
            lines.append(f"head{number}[lazy]: TEXT {text_literal(trigger)}")
        lines.append(f"tag{number}: {head} body{number}")
        lines.append(f"body{number}: " + "\n    | ".join(alternatives))
    return "\n".join([*lines, ""])


_TRANSLATORS = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
