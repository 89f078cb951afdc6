"""Variables that came by an env-file, and those of the cache from a `.env` file in the working directory. All other
settings in that file are `serve`'s to read.

`docker run --env-file` and `kubectl create configmap --from-env-file` hand over all that stands after `=`, with its
quotes and comments; `.env` files, Compose and systemd take those away.
"""

import os
import re
from pathlib import Path

from ostro.errors import BadRequest

_PLACE = ("OSTRO_CACHE", "LOCAL_MODEL_CACHE")
_LIMIT = ("OSTRO_CACHE_LIMIT",)
_HUB = ("HF_HOME", "HF_TOKEN")
_COMMENT = re.compile(r"\s#(\s|$)")


def as_in_dotenv(variable: str, value: str) -> str:
    """What a `.env` file would make of the value: without quotes around it.

    Raises BadRequest for one that ends in a comment: no setting has ` # ` in it, and a guess at where a key ends is
    worse.
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
    """Sets in the environment what the file says of the cache, unless the environment says something of it.

    What is there already loses the quotes that an env-file may have left around it.
    """
    for name in (*_PLACE, *_LIMIT, *_HUB):
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
