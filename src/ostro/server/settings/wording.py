"""Formats settings and complaints about them."""

import json
from pathlib import Path

from pydantic import SecretStr
from pydantic_core import ErrorDetails


def complaint(error: ErrorDetails) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shown(value: object) -> str:
    """As YAML."""
    match value:
        case Path():
            return json.dumps(str(value))
        case tuple():
            return f"[{', '.join(shown(each) for each in value)}]"
        case SecretStr():
            return '"***"'
        case _:
            return json.dumps(value)
