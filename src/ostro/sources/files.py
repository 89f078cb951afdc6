"""Which objects at a model's address belong to it, and whether any are missing. Works on file names and the index of
sharded weights; contacts no store.

Weights are fetched in one format only: safetensors if present, otherwise GGUF, otherwise pickles.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from ostro.errors import ModelNotFound

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "tokenizer.model", "vocab.json")
WeightFormat = Literal["safetensors", "gguf", "pickle"]

# No code, and only those subdirectories that are used: an adapter, an embedding model's modules, and the chat template
# for tools.
_WANTED = re.compile(
    r"(?:(?:adapter|\d+_\w+)/)?(?!\.)[^/]+\.(?:json|safetensors|jinja)|tokenizer\.model|[^/]+\.gguf"
    r"|pytorch_model(?:-\d{5}-of-\d{5})?\.bin|additional_chat_templates/tool_use\.jinja"
)
_FORMATS: dict[WeightFormat, re.Pattern[str]] = {
    "safetensors": re.compile(r"(?!adapter_)[^/]+\.safetensors|model\.safetensors\.index\.json"),
    "gguf": re.compile(r"[^/]+\.gguf"),
    "pickle": re.compile(r"pytorch_model(?:-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"),
}
# HRM's own trainer writes weights without a suffix: a published checkpoint, or one file per step.
HRM_CONFIG, HRM_PUBLISHED = "all_config.yaml", "checkpoint"
_HRM_STEP = re.compile(r"step_(\d+)")
# AI-OS's brains. FOLDER is `mind` or another directory in the brain, or the brain itself.
#   brain.json, checkpoint_metadata.json     the architecture; the tokenizer beside them or in `tokenizer`
#   FOLDER/actv1_student.safetensors         the weights; older ones are pickles
#   FOLDER/q_head.pt                         a q-head of its own
BRAIN, BRAIN_METADATA, BRAIN_MIND = "brain.json", "checkpoint_metadata.json", "mind"
STUDENT, LEGACY_STUDENT = "actv1_student.safetensors", "actv1_student.pt"
BRAIN_Q_HEAD = "q_head.pt"
_APART = "tokenizer/"
_UNWANTED = re.compile(r"consolidated.*\.safetensors")
# Everything a tokenizer needs: vocabulary, settings, special token ids and chat template.
_OF_TOKENIZER = frozenset(
    {
        *VOCABULARIES,
        *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
        *("chat_template.jinja", "chat_template.json", "config.json", "generation_config.json"),
        "additional_chat_templates/tool_use.jinja",
    }
)
_CONFIGS = ("config.json", ADAPTER_CONFIG)
# Formats without a config.json. A Levanter checkpoint is a database, or a directory per array.
_ITS_OWN_CONFIG = (".gguf", "manifest.ocdbt", "/.zarray", "/zarr.json")
_WEIGHTS = (".safetensors", ".bin", *_ITS_OWN_CONFIG)
_NO_WEIGHTS = f"weights ({SINGLE}, a GGUF file or {PICKLE})"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>gguf|safetensors|bin)")
# Levanter checkpoints. FOLDER is the place itself or step-N in it; the newest complete step is used.
#   FOLDER/metadata.json                 written last: without it the checkpoint is incomplete
#   FOLDER/model/…                       the weights; the optimizer state beside it is skipped
#   FOLDER/manifest.ocdbt, FOLDER/d/…    or a database that mixes weights and optimizer state: fetched whole
_ARRAYS = re.compile(r"(?P<folder>(?:step-(?P<step>\d+)/)?)(?:manifest\.ocdbt|model/transformer/.+)")
# metadata.json, manifest.json, and the tokenizer's files if present.
_BESIDE = r"[^/.][^/]*\.(?:json|jinja)|tokenizer\.model"
# Shards need an index beside them, unless the same weights also exist as a single file.
_WHOLE_AND_INDEX = {"safetensors": (SINGLE, INDEX), "bin": (PICKLE, PICKLE_INDEX)}


def model_files(names: Collection[str]) -> list[str]:
    """The model's files among a directory's names."""
    if (wanted := levanter_files(names)) is not None:
        return wanted
    if (wanted := hrm_files(names)) is not None:
        return wanted
    wanted = [name for name in names if _WANTED.fullmatch(name) and not _UNWANTED.fullmatch(name)]
    read = weight_format(wanted)
    others = [pattern for form, pattern in _FORMATS.items() if form != read]
    return [name for name in wanted if not any(pattern.fullmatch(name) for pattern in others)]


def levanter_files(names: Collection[str]) -> list[str] | None:
    """The files to fetch; None if this is not a Levanter checkpoint. Raises ModelNotFound if no step is complete."""
    folders = {match["folder"]: int(match["step"] or -1) for name in names if (match := _ARRAYS.fullmatch(name))}
    if not folders or "config.json" in names:
        return None
    complete = [folder for folder in folders if f"{folder}metadata.json" in names]
    if not complete:
        newest = max(folders, key=folders.__getitem__)
        raise ModelNotFound(
            f"The checkpoint is incomplete: it has no {newest}metadata.json, which Levanter writes last. "
            "Wait until it is written, or give another step."
        )
    folder = "" if "" in complete else max(complete, key=folders.__getitem__)
    data = r"manifest\.ocdbt|d/.+" if f"{folder}manifest.ocdbt" in names else r"model/.+"
    wanted = re.compile(f"{re.escape(folder)}(?:{_BESIDE}|{data})")
    return [name for name in names if wanted.fullmatch(name)]


def hrm_files(names: Collection[str]) -> list[str] | None:
    """The config, latest weights and tokenizer of an HRM: a run of its own trainer, or one of AI-OS's brains. None if
    this is neither.
    """
    weights = [name for name in names if hrm_step(name) is not None]
    if HRM_CONFIG in names and weights:
        return [HRM_CONFIG, max(weights, key=lambda name: hrm_step(name) or 0), *tokenizer_files(names)]
    students = [] if "config.json" in names else brain_students(names)
    if not students:
        return None
    wanted = set(students)
    for folder in {"", *(name.rpartition("/")[0] for name in students)}:
        prefix = f"{folder}/" if folder else ""
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        apart = [name.removeprefix(_APART) for name in inside if name.startswith(_APART)]
        of_tokenizer = (*tokenizer_files(inside), *(_APART + name for name in tokenizer_files(apart)))
        wanted |= {prefix + name for name in (BRAIN, BRAIN_METADATA, BRAIN_Q_HEAD, *of_tokenizer)}
    return [name for name in names if name in wanted]


def brain_students(names: Collection[str]) -> list[str]:
    """The weights of AI-OS's brains among a directory's names: its own, those in `mind`, or those in other directories,
    whichever of these there are first; safetensors rather than the same brain's pickle.
    """
    files = [name for name in names if name.count("/") <= 1 and name.rpartition("/")[2] in (STUDENT, LEGACY_STUDENT)]
    folders = sorted({name.rpartition("/")[0] for name in files}, key=lambda folder: (folder != "", folder))
    for first in ("", BRAIN_MIND):
        if first in folders:
            folders = [first]
    kinds = (f"{folder}/{kind}".lstrip("/") for folder in folders for kind in (STUDENT, LEGACY_STUDENT))
    found = [name for name in kinds if name in files]
    return [name for name in found if name.endswith(STUDENT)] or found


def is_hrm_directory(files: Collection[str]) -> bool:
    """Whether these are the files of an HRM's main directory, judging by their names alone."""
    is_run = HRM_CONFIG in files and any(hrm_step(name) is not None for name in files)
    return is_run or not {BRAIN, STUDENT, LEGACY_STUDENT}.isdisjoint(files)


def hrm_step(name: str) -> float | None:
    """The training step of a weight file; infinity for the published one, None for any other file."""
    if name == HRM_PUBLISHED:
        return math.inf
    return int(step[1]) if (step := _HRM_STEP.fullmatch(name)) else None


def weight_format(names: Collection[str]) -> WeightFormat | None:
    """The format in which a directory's weights are loaded; None if it has no supported weights."""
    for form, pattern in _FORMATS.items():
        # safetensors and pickles need a config.json; an adapter, for example, has a different one.
        if (form == "gguf" or "config.json" in names) and any(pattern.fullmatch(name) for name in names):
            return form
    return None


def tokenizer_files(names: Collection[str]) -> list[str]:
    """The tokenizer's files among a directory's names; a GGUF file if there is no other vocabulary."""
    if any(name in VOCABULARIES for name in names):
        return [name for name in names if name in _OF_TOKENIZER]
    return [name for name in names if _FORMATS["gguf"].fullmatch(name) and is_first_gguf(name)]


def is_first_gguf(name: str) -> bool:
    """Whether a GGUF file is a whole model or the first shard of one, which contains the vocabulary."""
    split = _SPLIT.fullmatch(name)
    return split is None or int(split["number"]) == 1


def gguf_prefix(file: str) -> str:
    """The prefix common to the names of all shards."""
    return split["stem"] if (split := _SPLIT.fullmatch(file)) else file


def gguf_files(names: Collection[str], file: str) -> list[str]:
    """The file itself, or all shards of its model."""
    parts = set(_parts(split)) if (split := _SPLIT.fullmatch(file)) else {file}
    return [name for name in names if name in parts]


def is_model(names: Collection[str]) -> bool:
    return hrm_files(names) is not None or any(name in _CONFIGS or name.endswith(_ITS_OWN_CONFIG) for name in names)


def is_index(name: str) -> bool:
    """Whether the file lists shards that must exist."""
    return name.rpartition("/")[2] in (INDEX, PICKLE_INDEX)


def missing(names: Collection[str], indexes: Mapping[str, bytes]) -> list[str]:
    """Files the model needs but lacks; `indexes` maps each index file to its content."""
    if hrm_files(names) is not None:
        return []
    if not any(name.endswith(_WEIGHTS) and not name.startswith("adapter/") for name in names):
        return [_NO_WEIGHTS]
    needed = [file for name, content in indexes.items() for file in _indexed(name, content)]
    for name in names:
        directory, _, file = name.rpartition("/")
        split = _SPLIT.fullmatch(file)
        if split is None:
            continue
        if split["suffix"] == "gguf":
            needed += [f"{directory}/{part}".lstrip("/") for part in _parts(split)]
            continue
        whole, index = _WHOLE_AND_INDEX[split["suffix"]]
        if f"{directory}/{whole}".lstrip("/") not in names:
            needed.append(f"{directory}/{index}".lstrip("/"))
    return sorted(set(needed).difference(names))


def _parts(split: re.Match[str]) -> Iterator[str]:
    count = split["count"]
    return (f"{split['stem']}-{number:05}-of-{count}.{split['suffix']}" for number in range(1, int(count) + 1))


def _indexed(name: str, content: bytes) -> Iterator[str]:
    """Yields nothing for a damaged index: loading the model reports that."""
    try:
        files = set(json.loads(content)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    directory = name[: name.rfind("/") + 1]
    yield from (f"{directory}{file}" for file in files if isinstance(file, str))
