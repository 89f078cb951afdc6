"""Finds models and adapters under a directory or prefix, from one listing. Reads no model files, and only those small
files of an adapter that name its base. Recognises formats by file suffix alone.

PLACE/NAME/config.json          NAME            PLACE/FILE.gguf              FILE
PLACE/ORG/NAME/config.json      ORG/NAME        PLACE/NAME/ONE.gguf          NAME
PLACE/NAME/brain.json           NAME            PLACE/NAME/{A,B}.gguf        NAME/A, NAME/B
PLACE/NAME/all_config.yaml      NAME, if weights of HRM's own trainer are beside it

PLACE/NAME/adapter_config.json              adapter NAME; its base is named by PLACE/NAME/base_model or by the config
PLACE/NAME/adapter/adapter_config.json      the same if NAME is not a model, otherwise NAME-adapter, on NAME
PLACE/NAME/base_model/config.json           the base of adapter NAME: NAME/base_model, or ORG/NAME-base for ORG/NAME
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from ostro.errors import ModelNotFound
from ostro.sources.address import StoreAddress, is_address, parse_address
from ostro.sources.base import ObjectChanged, ObjectInfo, Source, with_retries
from ostro.sources.clients import open_source
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_hrm_directory

CONFIG = "config.json"
GGUF = ".gguf"
ADAPTER, BASE = "adapter", "base_model"
_LEVELS = 2
# An adapter and its base in one directory, which may itself be two levels down.
_DEEPEST = re.compile(rf"[^/]+/[^/]+/(?:{ADAPTER}/(?:{ADAPTER_CONFIG}|{ADAPTER_WEIGHTS})|{BASE}/{CONFIG})")
# Read limit for small files: far larger than any legitimate one.
_MOST_BYTES = 1 << 18
# Names must also be valid in a URL path and in a request.
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LATER_FILE = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
_SPLIT = re.compile(r"-00001-of-\d{5}$")

Directories = Mapping[str, Mapping[str, ObjectInfo]]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's files, not yet interpreted."""

    config: bytes
    """Content of adapter_config.json; empty if unreadable."""
    base: str | None
    """The base model, if the adapter's location or a base_model file names it."""
    has_weights: bool


@dataclass(frozen=True, slots=True)
class FoundModel:
    name: str
    reference: str
    """A reference for `open_checkpoint`; for an adapter, its directory."""
    adapter: AdapterFiles | None = None
    """None for a model."""


def list_models(root: str) -> list[FoundModel]:
    """The models under a directory, `gs://BUCKET/PREFIX/` or `s3://BUCKET/PREFIX/`, sorted by name, then the adapters.
    Blocks: call it from a thread.

    Directories inside a model's directory belong to that model. Names that no request could contain are skipped.
    """
    read: Callable[[ObjectInfo], bytes]
    if is_address(root):
        place = parse_address(root)
        source = open_source(place)
        files = with_retries(f"Listing {place}", lambda: dict(files_of_models(source, place.directory)))
        base, read = str(place), lambda info: _read_object(_Object(place, info, source))
    else:
        directory = Path(os.path.expanduser(root)).absolute()
        if not directory.is_dir():
            raise ModelNotFound(f"There is no directory {directory} to find models in. Check the path.")
        files = {info.key: info for info in _list_directory(directory, _LEVELS + 1) if _tells(info.key)}
        base, read = str(directory), partial(_read_file, directory)
    directories = _directories(files)
    own_name = base.rsplit("/", 1)[-1]
    models = sorted(_models(directories, own_name))
    found = [FoundModel(name, f"{base}/{path}".rstrip("/")) for name, path in models]
    # Sequentially: a thread pool would delay the process's exit for as long as a store does not answer.
    for name, path, base_name in sorted(_adapters(directories, {path: name for name, path in models}, own_name)):
        adapter = _adapter_files(directories, path, base_name, read)
        found.append(FoundModel(name, f"{base}/{path}".rstrip("/"), adapter))
    return found


def files_of_models(source: Source, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Files keyed relative to the prefix. Skips those too deep to identify a model, however many there are."""
    files = ((info.key.removeprefix(prefix), info) for info in source.list(prefix))
    return ((key, info) for key, info in files if _tells(key))


def _tells(key: str) -> bool:
    return key.count("/") <= _LEVELS or _DEEPEST.fullmatch(key) is not None


def _directories(files: Mapping[str, ObjectInfo]) -> Directories:
    directories: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for key, info in files.items():
        directory, _, file = key.rpartition("/")
        directories[directory][file] = info
    return dict(directories)


def _models(directories: Directories, own_name: str) -> Iterator[tuple[str, str]]:
    """Names and paths relative to the root; `own_name` is used if the root itself is a model."""
    if _is_model(directories.get("", ())):
        if _is_name(own_name):
            yield own_name, ""
        return
    for directory, files in directories.items():
        if not any(_is_model(directories.get(above, ())) for above in _above(directory)):
            yield from (each for each in _models_in(directory, files) if _is_name(each[0]))


def _is_model(files: Collection[str]) -> bool:
    """Whether a directory with these files is one model as a whole."""
    return CONFIG in files or is_hrm_directory(files)


def _models_in(directory: str, files: Collection[str]) -> Iterator[tuple[str, str]]:
    firsts = [file for file in files if file.endswith(GGUF) and not _LATER_FILE.fullmatch(file)]
    if directory and (_is_model(files) or len(firsts) == 1):
        yield directory if directory.count("/") < _LEVELS else f"{_home(directory, BASE)}-base", directory
        return
    for file in firsts:
        path = f"{directory}/{file}".lstrip("/")
        yield _SPLIT.sub("", path.removesuffix(GGUF)), path


def _adapters(
    directories: Directories, models: Mapping[str, str], own_name: str
) -> Iterator[tuple[str, str, str | None]]:
    """Names, paths, and names of base models where the location implies one; `models` maps paths to names."""
    for directory, files in directories.items():
        if ADAPTER_CONFIG not in files or directory in models:
            continue
        home = _home(directory, ADAPTER)
        owners = {each for each in _above(directory) if each in models or ADAPTER_CONFIG in directories.get(each, ())}
        if owners - ({home} & models.keys()):
            continue
        own = models.get(home)
        name = home or own_name if own is None else f"{own}-adapter"
        if _is_name(name):
            yield name, directory, own or models.get(f"{home}/{BASE}".lstrip("/"))


def _adapter_files(
    directories: Directories, directory: str, base: str | None, read: Callable[[ObjectInfo], bytes]
) -> AdapterFiles:
    files = directories[directory]
    told = directories.get(_home(directory, ADAPTER), {}).get(BASE) or files.get(BASE)
    if base is None and told is not None:
        base = read(told).decode(errors="replace").strip() or None
    return AdapterFiles(read(files[ADAPTER_CONFIG]), base, ADAPTER_WEIGHTS in files)


@dataclass(frozen=True, slots=True)
class _Object:
    """One version of an object; its bytes never change."""

    place: StoreAddress
    info: ObjectInfo
    source: Source = field(compare=False)


@lru_cache(maxsize=1024)
def _read_object(version: _Object) -> bytes:
    """Empty if the object is empty or no longer exists."""
    info = version.info
    end = min(info.size, _MOST_BYTES)
    if not end:
        return b""
    read = partial(version.source.read, info.key, info.generation, 0, end)
    try:
        return with_retries(f"Reading {info.key}", lambda: b"".join(read()))
    except (ObjectChanged, ModelNotFound):
        return b""


def _read_file(directory: Path, info: ObjectInfo) -> bytes:
    try:
        with (directory / info.key).open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def _above(directory: str) -> list[str]:
    """All ancestors of a directory, including the root."""
    return ["", *(directory[:at] for at, letter in enumerate(directory) if letter == "/")] if directory else []


def _home(directory: str, last: str) -> str:
    """The parent directory if the last component is `last`, otherwise the directory itself."""
    parent, _, name = directory.rpartition("/")
    return parent if name == last else directory


def _is_name(text: str) -> bool:
    parts = text.split("/")
    return len(parts) <= _LEVELS and all(_PART.fullmatch(part) for part in parts)


def _list_directory(root: Path, depth: int) -> Iterator[ObjectInfo]:
    """Files up to `depth` directories below the root. Follows links; skips hidden and unreadable entries."""
    yield from _below(root, "", depth)


def _below(directory: Path, prefix: str, depth: int) -> Iterator[ObjectInfo]:
    try:
        found = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        if entry.name.startswith("."):
            continue
        # The entry may have been deleted, or be a link to itself.
        with suppress(OSError):
            if entry.is_file():
                status = entry.stat()
                yield ObjectInfo(prefix + entry.name, status.st_size, str(status.st_mtime_ns))
            elif depth and entry.is_dir():
                yield from _below(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
