"""The server's settings and where each came from. Starts nothing. A name that this build does not know is an error with
a suggestion; a value that it cannot honour is an error with the reason.

names     what settings are called, here and in other servers: one table, ALIASES
fields    the settings themselves
sources   the environment, `.env` and YAML files; found_config and levanter_training, those of other programs
merging   all of them merged, and what they imply
wording   how they are told
"""

from ostro.server.settings.fields import Bytes, Hosts, References, Secrets, ServeSettings, Texts
from ostro.server.settings.merging import IMPLIED, INSTALLED_DEFAULTS, Merged, read_settings
from ostro.server.settings.names import ALIASES, GROUPS, ONLY_IN_FILES, PREFIX, REFUSED, REPEATABLE, SECRETS, Names
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
]
