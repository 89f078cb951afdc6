"""From a model reference to a Checkpoint: where the files are, and who reads them. Imports no torch.

reference (see references.py)      source          format
(none), pypi:…                     pypi            GGUF
DIRECTORY                          local           safetensors, the one GGUF in it, or pickles; Levanter's; HRM's
FILE.safetensors .gguf .pt …       local           by suffix
gs://BUCKET/PATH s3://BUCKET/PATH  object store    safetensors, the one GGUF there, or pickles
ORG/NAME[@REVISION][:FILE.gguf]    hub             safetensors, GGUF, or pickles
ALIAS                              hub or pypi     as it is there
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ostro.errors import DownloadFailed, ModelError, ModelNotFound
from ostro.sources import aliases, hub, pypi
from ostro.sources.aliases import Alias
from ostro.sources.files import INDEX, SINGLE, is_first_gguf
from ostro.sources.hub import HubModel
from ostro.sources.pypi import WheelModel
from ostro.sources.references import FORMS, SUFFIXES, LocalModel, StoredModel, parse_model
from ostro.sources.remote_headers import ObjectFiles, hollow_copy
from ostro.weights.gguf_checkpoint import open_gguf
from ostro.weights.hf_checkpoint import open_directory, open_file
from ostro.weights.hrm_checkpoint import is_hrm, is_starter, open_hrm, starter_base
from ostro.weights.levanter_checkpoint import is_levanter, open_levanter
from ostro.weights.pooling import Pooling
from ostro.weights.stored import Stored

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """A model's files, understood. Tensors have the names and the orientation of its family's Hub checkpoints."""

    @property
    def path(self) -> Path:
        """The directory or the file."""

    @property
    def name(self) -> str:
        """Short, for display."""

    @property
    def config(self) -> Mapping[str, object]:
        """As config.json has it; `tie_word_embeddings` is always there, and if true there is no `lm_head.weight`."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """As generation_config.json has it; empty where there is none."""

    @property
    def pooling(self) -> Pooling | None:
        """How an embedding model pools; None for other models."""

    @property
    def tokenizer_path(self) -> Path:
        """The directory with the tokenizer's files, or the GGUF file that holds it."""

    def stored(self) -> Stored:
        """What the files hold, by their headers."""

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The weights, one at a time, mapped from the file where its format allows. Treat them as read-only."""


def open_checkpoint(
    ref: str | Path | None = None, *, model_config: str | None = None, progress: bool = True
) -> Checkpoint:
    """Finds the model, downloading it on first use, and reads its config. None is the default model.

    A path that exists wins over every other reading of `ref`. `model_config` is a YAML file that Levanter's checkpoints
    need.
    """
    match parse_model(ref):
        case WheelModel() as model:
            return _open_gguf(pypi.fetch(model, progress=progress), model.label)
        case LocalModel(path, exists=True):
            return _open_local(path, model_config, progress=progress)
        case LocalModel(path):
            raise ModelNotFound(f"There is no file or directory {path}.")
        case StoredModel() as model:
            return _open_object(model, model_config, progress=progress)
        case Alias() as alias:
            return _open_hub_path(aliases.fetch(alias, progress=progress), alias.name)
        case HubModel() as model:
            if model.is_pinned and (cached := open_cached(model)):
                return cached
            return _open_hub_path(hub.fetch(model, progress=progress), model.repo)


@contextmanager
def open_outline(ref: str | Path | None = None, *, model_config: str | None = None) -> Iterator[Checkpoint]:
    """As `open_checkpoint`, for whoever reads no tensors: of a model in a store or on the Hub only headers are fetched.

    Ends with the block.
    """
    found = _outlined(ref, model_config)
    if not isinstance(found, ObjectFiles | hub.HubFiles):
        yield found
        return
    with hollow_copy(found) as directory:
        try:
            yield _open_local_directory(directory, model_config, found.name)
        except (ModelError, ModelNotFound) as error:
            raise type(error)(error.message.replace(str(directory), str(ref))) from error


def _outlined(ref: str | Path | None, model_config: str | None) -> "Checkpoint | ObjectFiles | hub.HubFiles":
    from ostro.sources.store import ModelStore

    match parse_model(ref):
        case StoredModel() as model if ModelStore().find(model) is None:
            return ObjectFiles(model)
        case HubModel() as model:
            return open_cached(model) or hub.HubFiles(model)
        case Alias(hub=HubModel() as model) as alias:
            if (here := open_cached_alias(alias)) is not None:
                return here
            try:
                return hub.HubFiles(model)
            except (DownloadFailed, ModelNotFound):
                if alias.wheels is None:
                    raise
    return open_checkpoint(ref, model_config=model_config)


def open_cached(model: HubModel, name: str | None = None) -> Checkpoint | None:
    """A model of the Hub that is whole on this machine, without asking for a newer one."""
    path = hub.cached(model)
    with suppress(ModelNotFound):
        return None if path is None else _open_hub_path(path, name or model.repo)
    return None


def open_cached_alias(alias: Alias) -> Checkpoint | None:
    """The same of an alias, wherever it came from."""
    if (path := aliases.find(alias)) is not None:
        return _open_hub_path(path, alias.name)
    return None if alias.hub is None else open_cached(alias.hub, alias.name)


def _open_hub_path(path: Path, name: str) -> Checkpoint:
    if is_hrm(path):
        return open_hrm(path, name=name)
    return _open_gguf(path, name) if path.suffix == ".gguf" else open_directory(path, name=name)


def _open_local(path: Path, model_config: str | None, *, progress: bool) -> Checkpoint:
    if is_starter(path):
        return open_checkpoint(starter_base(path), model_config=model_config, progress=progress)
    if is_hrm(path):
        return open_hrm(path)
    if path.is_dir():
        return _open_local_directory(path, model_config)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix not in SUFFIXES:
        raise ModelNotFound(f"{path} is no model file that Ostro knows. Give {FORMS}.")
    # The file's own name says something only if it is not the usual one.
    usual = path.stem in ("model", "pytorch_model", "consolidated")
    return open_file(path, name=path.absolute().parent.name if usual else path.stem)


def _open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    model = open_gguf(path, name)
    if not pypi.is_default(path):
        return model
    return replace(model, generation_config={**pypi.DEFAULT_GENERATION_CONFIG, **model.generation_config})


def _open_object(model: StoredModel, model_config: str | None, *, progress: bool) -> Checkpoint:
    from ostro.sources.fetch import fetch_model

    return _open_local_directory(fetch_model(str(model), progress=progress), model_config, model.name)


def _open_local_directory(directory: Path, model_config: str | None, name: str | None = None) -> Checkpoint:
    if is_hrm(directory):
        return open_hrm(directory, name=name)
    if is_levanter(directory):
        return open_levanter(directory, None if model_config is None else Path(model_config), name=name)
    if not _has_safetensors(directory):
        models = [path for path in sorted(directory.glob("*.gguf")) if is_first_gguf(path.name)]
        if len(models) == 1:
            return _open_gguf(models[0], name)
        if models:
            names = ", ".join(path.name for path in models)
            raise ModelNotFound(f"{directory} holds several models ({names}). Give the path of one.")
    return open_directory(directory, name=name or directory.absolute().name)


def _has_safetensors(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in (INDEX, SINGLE))
