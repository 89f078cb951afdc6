"""Where models are kept, from a `.env` file in the working directory. Other settings in it are `serve`'s to read."""

import os
from pathlib import Path

from ostro.server.env_file import as_in_dotenv

_PLACE = ("OSTRO_CACHE", "LOCAL_MODEL_CACHE")
_LIMIT = ("OSTRO_CACHE_LIMIT",)
_HUB = ("HF_HOME", "HF_TOKEN")


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
