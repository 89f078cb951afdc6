"""Which objects at a model's address are its files, and whether all of them are there. Knows names, and the index of
weights that were split; knows no stores.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping

from ostro.sources.levanter import levanter_files

# No pickles, no code, and of the directories only those that are read: an adapter, and an embedding model's modules.
_WANTED = re.compile(r"(?:(?:adapter|\d+_\w+)/)?(?!\.)[^/]+\.(?:json|safetensors|jinja)|tokenizer\.model|[^/]+\.gguf")
_UNWANTED = re.compile(r"consolidated.*\.safetensors")
_CONFIGS = ("config.json", "adapter_config.json")
# What a model without config.json has instead: one of Levanter's is a database, or a directory for each array.
_ITS_OWN_CONFIG = (".gguf", "manifest.ocdbt", "/.zarray", "/zarr.json")
_WEIGHTS = (".safetensors", *_ITS_OWN_CONFIG)
_INDEX = "model.safetensors.index.json"
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.(?P<suffix>gguf|safetensors)")


def model_files(names: Collection[str]) -> list[str]:
    """Those of a directory that are the model's."""
    wanted = levanter_files(names)
    if wanted is None:
        wanted = [name for name in names if _WANTED.fullmatch(name) and not _UNWANTED.fullmatch(name)]
    if "config.json" in wanted and any(name.endswith(".safetensors") for name in wanted):
        wanted = [name for name in wanted if not name.endswith(".gguf")]
    return wanted


def gguf_prefix(file: str) -> str:
    """What the names of all files of the model begin with."""
    return split["stem"] if (split := _SPLIT.fullmatch(file)) else file


def gguf_files(names: Collection[str], file: str) -> list[str]:
    """One file, or all files of a model that was split."""
    parts = set(_parts(split)) if (split := _SPLIT.fullmatch(file)) else {file}
    return [name for name in names if name in parts]


def is_model(names: Collection[str]) -> bool:
    return any(name in _CONFIGS or name.endswith(_ITS_OWN_CONFIG) for name in names)


def is_index(name: str) -> bool:
    """Whether the file tells which others there must be."""
    return name.rpartition("/")[2] == _INDEX


def missing(names: Collection[str], indexes: Mapping[str, bytes]) -> list[str]:
    """What the model lacks; `indexes` has the content of every index among its files."""
    if not any(name.endswith(_WEIGHTS) and not name.startswith("adapter/") for name in names):
        return ["weights (*.safetensors or *.gguf; pickles are never fetched)"]
    needed = [file for name, content in indexes.items() for file in _indexed(name, content)]
    for name in names:
        directory, _, file = name.rpartition("/")
        split = _SPLIT.fullmatch(file)
        if split and split["suffix"] == "gguf":
            needed += [f"{directory}/{part}".lstrip("/") for part in _parts(split)]
        elif split and f"{directory}/model.safetensors".lstrip("/") not in names:
            needed.append(f"{directory}/{_INDEX}".lstrip("/"))
    return sorted(set(needed).difference(names))


def _parts(split: re.Match[str]) -> Iterator[str]:
    count = split["count"]
    return (f"{split['stem']}-{number:05}-of-{count}.{split['suffix']}" for number in range(1, int(count) + 1))


def _indexed(name: str, content: bytes) -> Iterator[str]:
    """Of a damaged index nothing: whoever opens the model tells."""
    try:
        files = set(json.loads(content)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    directory = name[: -len(_INDEX)]
    yield from (f"{directory}{file}" for file in files if isinstance(file, str))
