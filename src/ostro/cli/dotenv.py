"""Where models are kept, from a `.env` file in the working directory. Other settings in it are `serve`'s to read."""

import os
from pathlib import Path

_PLACE = ("OSTRO_CACHE", "LOCAL_MODEL_CACHE")
_LIMIT = ("OSTRO_CACHE_LIMIT",)


def read_cache_variables(directory: Path = Path()) -> None:
    """Sets in the environment what the file says of the cache, unless the environment says something of it."""
    path = directory / ".env"
    if not path.is_file():
        return
    from pydantic_settings import BaseSettings, DotEnvSettingsSource

    found = DotEnvSettingsSource(BaseSettings, env_file=path, case_sensitive=True).env_vars
    for names in (_PLACE, _LIMIT):
        if not any(os.environ.get(name) for name in names):
            os.environ.update({name: value for name in names if (value := found.get(name))})
