"""The server's settings and where each came from. Starts nothing. An unknown name is an error with a suggestion; an
unsupported value is an error with the reason.

names     other names of settings, and their groups
fields    the settings themselves; those of engines come from EngineConfig
sources   the environment, `.env` and YAML files; found_config and levanter_training: other programs' files
merging   merges all sources and applies implied settings
wording   formats settings for messages
"""

from ostro.server.settings.fields import (
    ENGINE_SETTINGS,
    Bytes,
    Directory,
    Hosts,
    References,
    Secrets,
    ServeSettings,
    Texts,
)
from ostro.server.settings.merging import IMPLIED, INSTALLED_DEFAULTS, Merged, read_settings
from ostro.server.settings.names import (
    ALIASES,
    GROUPS,
    NOT_SETTINGS,
    ONLY_IN_FILES,
    RAY_PREFIX,
    REFUSED,
    REPEATABLE,
    SECRETS,
    variables_of,
)
from ostro.server.settings.sources import Given, check_environment, check_variables

__all__ = [
    "ALIASES",
    "ENGINE_SETTINGS",
    "GROUPS",
    "IMPLIED",
    "INSTALLED_DEFAULTS",
    "NOT_SETTINGS",
    "ONLY_IN_FILES",
    "RAY_PREFIX",
    "REFUSED",
    "REPEATABLE",
    "SECRETS",
    "Bytes",
    "Directory",
    "Given",
    "Hosts",
    "Merged",
    "References",
    "Secrets",
    "ServeSettings",
    "Texts",
    "check_environment",
    "check_variables",
    "read_settings",
    "variables_of",
]
