"""The Helm chart's schema of values, with the names of the server's settings."""

import json
from pathlib import Path

from ostro.server.settings import ONLY_IN_FILES, SECRETS, ServeSettings

PATH = Path(__file__).parents[2] / "deploy" / "helm" / "ostro" / "values.schema.json"
# Where the server listens and how its health is told are the chart's, and keys come from secrets.
_NOT_IN_VALUES = {"host", "port", "healthz_waits_for_model", *SECRETS, *ONLY_IN_FILES}


def text() -> str:
    schema = json.loads(PATH.read_text(encoding="utf-8"))
    names = [name for name in ServeSettings.model_fields if name not in _NOT_IN_VALUES]
    schema["definitions"]["settingName"] = {"enum": names}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
