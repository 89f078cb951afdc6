"""Opens a model reference as a Checkpoint: `sources` provides the files, and their type selects the reader. Imports no
torch.

DIRECTORY                     safetensors, its only GGUF file, or pickles; a Levanter or HRM checkpoint
FILE.safetensors .gguf .pt …  by suffix
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ostro.errors import ModelError, ModelNotFound
from ostro.sources.aliases import recommended_sampling
from ostro.sources.files import INDEX, SINGLE, is_first_gguf
from ostro.sources.model_reference import ModelReference, RemoteFiles
from ostro.sources.references import FORMS, SUFFIXES, USUAL_STEMS, LocalModel, parse_model
from ostro.sources.remote_headers import hollow_copy
from ostro.weights.gguf_checkpoint import open_gguf
from ostro.weights.hf_checkpoint import HfCheckpoint, open_directory, open_file
from ostro.weights.hrm_checkpoint import HrmCheckpoint, is_hrm, is_starter, open_hrm, starter_base
from ostro.weights.hrm_settings import HrmSettings
from ostro.weights.levanter_checkpoint import is_levanter, open_levanter
from ostro.weights.pooling import Pooling
from ostro.weights.stored import Stored

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import Weight
    from ostro.weights.slices import SlicedWeight


class Checkpoint(Protocol):
    """A model's files. Tensors have the names and orientation of the family's Hub checkpoints."""

    @property
    def path(self) -> Path:
        """The model's directory or file."""

    @property
    def name(self) -> str:
        """Short display name."""

    @property
    def config(self) -> Mapping[str, object]:
        """In config.json's format. `tie_word_embeddings` is always set; if true, there is no `lm_head.weight`."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """In generation_config.json's format; empty if there is none."""

    @property
    def pooling(self) -> Pooling | None:
        """How an embedding model pools; None for other models."""

    @property
    def tokenizer_path(self) -> Path:
        """The directory with the tokenizer's files, or the GGUF file that holds it."""

    @property
    def files(self) -> list[Path]:
        """Files that contain or may contain its tensors, sorted by path."""

    def stored(self) -> Stored:
        """The contents of the files, from their headers."""

    def arrays(self) -> Iterator[tuple[str, "Weight"]]:
        """The weights one at a time, memory-mapped where the file format allows, without torch."""

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        """The weights one at a time, to be read in parts: each is valid until the next is asked for."""

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The same as torch tensors, with quantized weights decoded. Treat them as read-only."""


def open_checkpoint(
    ref: str | Path | None = None, *, model_config: str | None = None, progress: bool = True
) -> Checkpoint:
    """Finds the model, downloading it on first use, and reads its config. None is the default model.

    An existing path takes precedence over every other meaning of `ref`. `model_config` is the YAML file that a
    Levanter checkpoint needs.
    """
    reference = parse_model(ref)
    return _open(reference, reference.fetch(progress=progress), model_config, progress=progress)


def with_hrm_settings(checkpoint: Checkpoint, settings: HrmSettings) -> Checkpoint:
    """The same weights; for an HRM, the operator's settings override those in the files."""
    return checkpoint.with_settings(settings) if isinstance(checkpoint, HrmCheckpoint) else checkpoint


@contextmanager
def open_headers(ref: str | Path | None = None, *, model_config: str | None = None) -> Iterator[Checkpoint]:
    """Like `open_checkpoint`, but the tensors cannot be read: for a remote model only file headers are fetched.

    Valid inside the block only.
    """
    reference = parse_model(ref)
    here = reference.find(newest=False)
    files = None if here is not None else reference.remote_files()
    if files is None:
        yield _open(reference, here or reference.fetch(progress=True), model_config, progress=True)
        return
    with open_remote_headers(files, str(ref), model_config=model_config) as headers:
        yield headers


@contextmanager
def open_remote_headers(files: RemoteFiles, shown: str, *, model_config: str | None = None) -> Iterator[Checkpoint]:
    """The headers of files at their source. Errors call the model `shown`. Valid inside the block only."""
    with hollow_copy(files) as directory:
        try:
            yield _open_directory(directory, model_config, files.name)
        except (ModelError, ModelNotFound) as error:
            raise type(error)(error.message.replace(str(directory), shown)) from error


def _open(reference: ModelReference, path: Path, model_config: str | None, *, progress: bool) -> Checkpoint:
    if isinstance(reference, LocalModel) and is_starter(path):
        return open_checkpoint(starter_base(path), model_config=model_config, progress=progress)
    name = reference.label
    if is_hrm(path):
        return open_hrm(path, name=name)
    if path.is_dir():
        return _open_directory(path, model_config, name)
    if path.suffix == ".gguf":
        return _open_gguf(path, name)
    if path.suffix not in SUFFIXES:
        raise ModelNotFound(f"{path} is not a model file that Ostro knows. Give {FORMS}.")
    usual = path.stem in USUAL_STEMS
    return _decoded(open_file(path, name=name or (path.absolute().parent.name if usual else path.stem)))


def _open_gguf(path: Path, name: str | None) -> Checkpoint:
    model = open_gguf(path, name)
    return replace(model, generation_config={**recommended_sampling(path), **model.generation_config})


def _open_directory(directory: Path, model_config: str | None, name: str | None) -> Checkpoint:
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
    return _decoded(open_directory(directory, name=name or directory.absolute().name))


def _decoded(checkpoint: HfCheckpoint) -> Checkpoint:
    # The second is an older name for the config of compressed-tensors.
    quantization = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    if not quantization:
        return checkpoint
    # Imports numpy.
    from ostro.weights.quantized.checkpoint import decoding

    return decoding(checkpoint, quantization)


def _has_safetensors(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in (INDEX, SINGLE))
