"""Which models lie under a place, from one listing: no file is read. Knows names, and no formats beyond suffixes.

PLACE/NAME/config.json          NAME            PLACE/FILE.gguf              FILE
PLACE/ORG/NAME/config.json      ORG/NAME        PLACE/NAME/ONE.gguf          NAME
                                                PLACE/NAME/{A,B}.gguf        NAME/A, NAME/B
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import ModelNotFound
from ostro.sources.base import Source, is_reference, open_source, parse_reference, patiently
from ostro.sources.local import list_directory

CONFIG = "config.json"
GGUF = ".gguf"
_LEVELS = 2
# Also what a client may write into a path or a request.
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LATER_FILE = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_SPLIT = re.compile(r"-00001-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class FoundModel:
    name: str
    reference: str
    """What `open_checkpoint` takes."""


def list_models(root: str) -> list[FoundModel]:
    """The models under a directory, `gs://BUCKET/PREFIX/` or `s3://BUCKET/PREFIX/`, by name. Blocks: use a thread.

    A directory inside a model's belongs to that model. What has a name that no request could carry is left out.
    """
    if is_reference(root):
        place = parse_reference(root)
        source = open_source(place)
        keys = patiently(f"Listing {place}", lambda: list(keys_of_models(source, place.directory)))
        base = str(place)
    else:
        directory = Path(os.path.expanduser(root)).absolute()
        if not directory.is_dir():
            raise ModelNotFound(f"There is no directory {directory} to find models in. Check the path.")
        keys = [info.key for info in list_directory(directory, _LEVELS)]
        base = str(directory)
    models = _models(keys, own_name=base.rsplit("/", 1)[-1])
    return [FoundModel(name, f"{base}/{path}".rstrip("/")) for name, path in sorted(models)]


def keys_of_models(source: Source, prefix: str) -> Iterator[str]:
    """Relative to the prefix; those too deep to tell of a model are left out, however many there are."""
    keys = (info.key.removeprefix(prefix) for info in source.list(prefix))
    return (key for key in keys if key.count("/") <= _LEVELS)


def _models(keys: Iterable[str], own_name: str) -> Iterator[tuple[str, str]]:
    """Names and where they are, relative to the place; `own_name` is for a place that is a model itself."""
    files: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        directory, _, file = key.rpartition("/")
        files[directory].append(file)
    if CONFIG in files[""]:
        if _is_name(own_name):
            yield own_name, ""
        return
    for directory, names in files.items():
        parents = [directory[:at] for at, letter in enumerate(directory) if letter == "/"]
        if not any(CONFIG in files.get(parent, ()) for parent in parents):
            yield from (each for each in _models_in(directory, names) if _is_name(each[0]))


def _models_in(directory: str, files: list[str]) -> Iterator[tuple[str, str]]:
    firsts = [file for file in files if file.endswith(GGUF) and not _LATER_FILE.fullmatch(file)]
    if directory and (CONFIG in files or len(firsts) == 1):
        yield directory, directory
        return
    for file in firsts:
        path = f"{directory}/{file}".lstrip("/")
        yield _SPLIT.sub("", path.removesuffix(GGUF)), path


def _is_name(text: str) -> bool:
    parts = text.split("/")
    return len(parts) <= _LEVELS and all(_PART.fullmatch(part) for part in parts)
