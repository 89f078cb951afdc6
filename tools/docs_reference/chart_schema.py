"""The Helm chart's schema of values, with the names and types of the server's settings."""

import json
from collections.abc import Mapping
from pathlib import Path

from ostro.server.settings import ONLY_IN_FILES, SECRETS, ServeSettings, variables_of

PATH = Path(__file__).parents[2] / "deploy" / "helm" / "ostro" / "values.schema.json"
# The chart decides where the server listens and how it reports its health; keys come from secrets.
_NOT_IN_VALUES = {"host", "port", "healthz_waits_for_model", "api_key_file", *SECRETS, *ONLY_IN_FILES}
# Secrets that have no value of their own and come from the container's environment.
_KEYS_IN_ENVIRONMENT = ("priority_key", "admin_key")
_KEYWORDS = {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum"}
# As `read_size` reads it: 512M, 1.5GiB.
_SIZE = r"^[0-9]+(\.[0-9]+)?([KMGkmg]i?)?[Bb]?$"
Schema = Mapping[str, object]


def text() -> str:
    schema = json.loads(PATH.read_text(encoding="utf-8"))
    fields = ServeSettings.model_json_schema(by_alias=False)["properties"]
    schema["definitions"] |= {
        "settings": {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: _value(field) for name, field in fields.items() if name not in _NOT_IN_VALUES},
        },
        "settingVariable": {
            "enum": [each for name in fields if name not in _KEYS_IN_ENVIRONMENT for each in variables_of(name)]
        },
        "keyVariable": {"enum": [*(each for name in _KEYS_IN_ENVIRONMENT for each in variables_of(name)), "HF_TOKEN"]},
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _value(field: Schema) -> Schema:
    """Pydantic's schema of a setting as that of a value of the chart: a scalar, and never null."""
    choices = field.get("anyOf")
    if isinstance(choices, list):
        found = [_value(each) for each in choices if each.get("type") != "null"]
        if found == [{"type": "integer"}, {"type": "string"}]:
            return {"type": ["integer", "string"], "minimum": field["ge"], "pattern": _SIZE}
        return found[0] if len(found) == 1 else {"anyOf": found}
    if field["type"] == "array":
        # Several are separated by commas.
        return {"type": "string", "minLength": 1}
    return {key: each for key, each in field.items() if key in _KEYWORDS}
