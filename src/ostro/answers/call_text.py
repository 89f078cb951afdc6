"""Writes calls as a model would: for histories, and as an example for the model."""

import json
from collections.abc import Mapping, Sequence

from ostro.answers.formats import CallFormat, HarmonyCalls, JsonCalls, NamedCalls, PythonCalls, TaggedCalls

Written = tuple[str, Mapping[str, object]]
"""A call's name and arguments."""


def calls_text(format: CallFormat, calls: Sequence[Written]) -> str:
    blocks = [[call] for call in calls] if format.repeats else [calls]
    return format.between.join(f"{format.begin}{format.lead}{_block(format, block)}{format.end}" for block in blocks)


def _block(format: CallFormat, calls: Sequence[Written]) -> str:
    match format.calls:
        case JsonCalls(arguments=key, in_list=in_list, separator=separator):
            texts = [_dumped({"name": name, key: arguments}) for name, arguments in calls]
            return f"[{', '.join(texts)}]" if in_list else separator.join(texts)
        case NamedCalls() as kind:
            return kind.separator.join(
                f"{kind.begin}{name}{kind.name_end}{_dumped(arguments)}{kind.end}" for name, arguments in calls
            )
        case PythonCalls():
            return f"[{', '.join(_python(name, arguments) for name, arguments in calls)}]"
        case TaggedCalls():
            return "\n".join(_tagged(name, arguments) for name, arguments in calls)
        case HarmonyCalls():
            return "\n".join(f"functions.{name}: {_dumped(arguments)}" for name, arguments in calls)


def _python(name: str, arguments: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _tagged(name: str, arguments: Mapping[str, object]) -> str:
    values = {key: value if isinstance(value, str) else _dumped(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
