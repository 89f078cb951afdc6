"""The server's settings and where each came from. Starts nothing. An unknown name is an error with a suggestion; an
unsupported value is an error with the reason.

names     names of settings, here and in other servers: one table, ALIASES
fields    the settings themselves
sources   the environment, `.env` and YAML files; found_config and levanter_training: other programs' files
merging   merges all sources and applies implied settings
wording   formats settings for messages
"""

from ostro.server.settings.fields import Bytes, Directory, Hosts, References, Secrets, ServeSettings, Texts
from ostro.server.settings.merging import IMPLIED, INSTALLED_DEFAULTS, Merged, read_settings
from ostro.server.settings.names import (
    ALIASES,
    GROUPS,
    ONLY_IN_FILES,
    PREFIX,
    REFUSED,
    REPEATABLE,
    SECRETS,
    Names,
    variables_of,
)
from ostro.server.settings.sources import Given, check_environment

__all__ = [
    "ALIASES",
    "GROUPS",
    "IMPLIED",
    "INSTALLED_DEFAULTS",
    "ONLY_IN_FILES",
    "PREFIX",
    "REFUSED",
    "REPEATABLE",
    "SECRETS",
    "Bytes",
    "Directory",
    "Given",
    "Hosts",
    "Merged",
    "Names",
    "References",
    "Secrets",
    "ServeSettings",
    "Texts",
    "check_environment",
    "read_settings",
    "variables_of",
]
