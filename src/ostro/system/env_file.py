"""Handles variables passed in env-files, and reads the cache variables from a `.env` file in the working directory;
`serve` reads all other settings in that file.

`docker run --env-file` and `kubectl create configmap --from-env-file` pass on everything after `=`, including quotes
and comments; `.env` files, Compose and systemd strip those.
"""

import os
import re
from pathlib import Path

from ostro.errors import BadRequest

_PLACE = ("OSTRO_CACHE", "LOCAL_MODEL_CACHE")
_LIMIT = ("OSTRO_CACHE_LIMIT",)
CACHE_VARIABLES = (*_PLACE, *_LIMIT)
_HUB = ("HF_HOME", "HF_TOKEN")
_COMMENT = re.compile(r"\s#(\s|$)")


def as_in_dotenv(variable: str, value: str) -> str:
    """The value as a `.env` file would be parsed: without surrounding quotes.

    Raises BadRequest if it ends in a comment: no setting contains ` # `, and guessing where a key ends would be worse.
    """
    bare = value.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "\"'":
        return bare[1:-1]
    if _COMMENT.search(value):
        raise BadRequest(
            f"{variable} in the environment ends in a comment, as docker's --env-file leaves it there. "
            "Put the comment on a line of its own."
        )
    return value


def read_cache_variables(directory: Path = Path()) -> None:
    """Sets the cache variables from the file in the environment, unless they are already set there.

    Existing values lose the quotes that an env-file may have left around them.
    """
    for name in (*CACHE_VARIABLES, *_HUB):
        if value := os.environ.get(name):
            os.environ[name] = as_in_dotenv(name, value)
    path = directory / ".env"
    if not path.is_file():
        return
    from pydantic_settings import BaseSettings, DotEnvSettingsSource

    found = DotEnvSettingsSource(BaseSettings, env_file=path, case_sensitive=True).env_vars
    for names in (_PLACE, _LIMIT):
        if not any(os.environ.get(name) for name in names):
            os.environ.update({name: value for name in names if (value := found.get(name))})
