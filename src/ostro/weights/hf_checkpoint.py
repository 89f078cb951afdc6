"""A model in Hugging Face's layout, as a Checkpoint: config.json with safetensors or pickled tensors.

Defines the config's format and the canonical tensor names.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostro.errors import BadCheckpoint, ModelNotFound
from ostro.formats.json_file import read_json_object
from ostro.models.config import ConfigReader
from ostro.models.encoder import Encoder
from ostro.models.families.common import STACKED, STACKED_NAMES
from ostro.models.registry import describe, describe_encoder, family_of, is_encoder
from ostro.sources.files import INDEX, PICKLE, PICKLE_INDEX, PICKLE_SUFFIXES, SINGLE
from ostro.weights.encoder_files import decoder_pooling, encoder_config, encoder_pooling, encoder_renamer
from ostro.weights.pooling import Pooling, read_matryoshka
from ostro.weights.stored import Stored, TensorHeader, safetensors_headers
from ostro.weights.tensor_files import pickled_arrays, read_pickle, read_safetensors, safetensors_names
from ostro.weights.wrapped_config import text_part

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import WeightArray
    from ostro.weights.slices import SlicedWeight

_TORCH_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FORMAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
T = TypeVar("T")
_STACKED_EXPERTS = tuple(f".{name}" for name in STACKED_NAMES.up)
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    path: Path
    name: str
    config: dict[str, object]
    generation_config: dict[str, object]
    pooling: Pooling | None
    tokenizer_path: Path
    names: dict[Path, frozenset[str]]
    """The tensors to load from each weight file, by their stored names."""
    encoder: Encoder | None = None
    """The description of an encoder, which its tensors' names depend on."""

    @property
    def files(self) -> list[Path]:
        return sorted(self.names)

    def stored(self) -> Stored:
        sizes = [path.stat().st_size for path in self.files]
        return Stored(tensors=list(self._headers()), file_bytes=sum(sizes), largest_file=max(sizes))

    def arrays(self) -> Iterator[tuple[str, "WeightArray"]]:
        from ostro.weights import arrays

        for path, names in self.names.items():
            if path.suffix in PICKLE_SUFFIXES:
                yield from self._renamed(pickled_arrays(path, names))
            else:
                yield from self._renamed(arrays.read_safetensors(path, names))

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        from ostro.weights.slices import sliced

        return sliced(self.arrays())

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        for path, names in self.names.items():
            read = read_pickle if path.suffix in PICKLE_SUFFIXES else read_safetensors
            yield from self._renamed(read(path, names))

    def _renamed(self, stored: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The language model's weights under their canonical names."""
        rename = self._renamer()
        for stored_name, weight in stored:
            if (name := rename(stored_name)) is not None:
                yield name, weight

    def _renamer(self) -> Callable[[str], str | None]:
        return renamer(self.config) if self.encoder is None else encoder_renamer(self.encoder)

    def _headers(self) -> Iterator[TensorHeader]:
        rename = self._renamer()
        for path, names in self.names.items():
            if path.suffix in PICKLE_SUFFIXES:
                # A pickle has no header: derive the number of values from its size and the config's dtype.
                stored, width = _pickled_format(self.config), describe(self.config).shape.hidden_size
                rows = path.stat().st_size // _FORMAT_BYTES[stored] // width
                yield TensorHeader("layers.0.all", (rows, width), stored)
                continue
            for tensor in safetensors_headers(path):
                if tensor.name in names and (name := rename(tensor.name)) is not None:
                    yield TensorHeader(name, tensor.shape, tensor.format)


def _pickled_format(config: Mapping[str, object]) -> str:
    return _TORCH_FORMATS.get(str(config.get("torch_dtype") or config.get("dtype")), "F32")


def open_directory(directory: Path, name: str) -> HfCheckpoint:
    """Opens a directory with config.json and safetensors, or else pytorch_model.bin."""
    return _checkpoint(directory, directory, name, _read_config(directory), _weight_files(directory))


def _weight_files(directory: Path) -> dict[Path, frozenset[str]]:
    if (directory / INDEX).is_file():
        return _indexed_files(directory / INDEX)
    if (directory / SINGLE).is_file():
        return {directory / SINGLE: safetensors_names(directory / SINGLE)}
    if (directory / PICKLE_INDEX).is_file():
        return _indexed_files(directory / PICKLE_INDEX)
    if (directory / PICKLE).is_file():
        return {directory / PICKLE: frozenset()}
    raise _no_weights(directory)


def open_file(path: Path, name: str) -> HfCheckpoint:
    """Opens one weights file, with the config.json beside it."""
    config = _read_config(path.parent)
    if path.suffix in PICKLE_SUFFIXES:
        return _checkpoint(path, path.parent, name, config, {path: frozenset()})
    if _SHARD.fullmatch(path.name) and (path.parent / INDEX).is_file():
        raise ModelNotFound(f"{path} is one of several files of a model. Give its directory, {path.parent}.")
    return _checkpoint(path, path.parent, name, config, {path: safetensors_names(path)})


def _checkpoint(
    path: Path, directory: Path, name: str, config: dict[str, object], files: dict[Path, frozenset[str]]
) -> HfCheckpoint:
    generation_file = directory / "generation_config.json"
    generation_config = read_json_object(generation_file) if generation_file.is_file() else {}
    config = encoder_config(directory, config) if is_encoder(config) else config
    stored = (_of_language_model(name) for names in files.values() for name in names)
    if any(name is not None and name.endswith(_STACKED_EXPERTS) for name in stored):
        config[STACKED] = True
    encoder = describe_encoder(config)
    pooling = decoder_pooling(directory) if encoder is None else encoder_pooling(directory, encoder)
    if pooling is not None:
        pooling = replace(pooling, dimensions=read_matryoshka(ConfigReader(config)))
    return HfCheckpoint(path, name, config, generation_config, pooling, directory, files, encoder)


def _no_weights(directory: Path) -> ModelNotFound:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return ModelNotFound(
            f"{directory} holds no {SINGLE} and no {PICKLE}, but {pickles[0]}, which Ostro reads only when you name "
            f"the file itself: {directory / pickles[0]}. Better, convert it to safetensors."
        )
    return ModelNotFound(
        f"{directory} holds no weights that Ostro reads: {SINGLE}, {PICKLE}, the index of either ({INDEX}, "
        f"{PICKLE_INDEX}), or a GGUF file. Put them there."
    )


# --- config ---------------------------------------------------------------------------------------------------------


def _read_config(directory: Path) -> dict[str, object]:
    config = read_json_object(directory / "config.json")
    _check_names(directory / "config.json", config)
    config = text_part(directory / "config.json", config)
    # LFM2's own name for it, which goes before the other.
    if (tied := config.get("tie_embedding")) is not None:
        config["tie_word_embeddings"] = tied
    if config.get("tie_word_embeddings") is None:
        family = family_of(config)
        config["tie_word_embeddings"] = family is not None and family.tied
    return config


def _check_names(path: Path, config: dict[str, object]) -> None:
    """Checks the fields needed to select a family; everything else is checked when the model is described."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = [*(architectures if isinstance(architectures, list) else [architectures]), model_type]
    if not all(name is None or isinstance(name, str) for name in names):
        raise BadCheckpoint(
            f"{path}: 'architectures' must be a list of strings, and 'model_type' a string. Download it again."
        )


# --- names ----------------------------------------------------------------------------------------------------------

# The parts of multimodal models that are not for text, and layers that guess several tokens ahead.
_NOT_READ = re.compile(
    r"(model\.)?(vision_(tower|model|embedder)|multi_modal_projector|visual|embed_vision|audio_tower|embed_audio|mtp)\."
)
_WRAPPED = re.compile(r"^(?:language_model\.model|model\.language_model)\.")
# Masks and frequencies that old checkpoints stored among the weights.
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")


def _of_language_model(name: str) -> str | None:
    """A stored name without its wrappers' prefixes; None if it is of a part that is not read."""
    # torch.compile adds this prefix to the names of wrapped modules.
    name = name.replace("_orig_mod.", "")
    name = _WRAPPED.sub("model.", name).removeprefix("language_model.")
    return None if _NOT_READ.match(name) else name


def renamer(config: dict[str, object]) -> Callable[[str], str | None]:
    """Maps stored names to canonical names, or to None for tensors that are not weights of the language model."""
    family, tied = family_of(config), bool(config["tie_word_embeddings"])
    unread = family.unread(ConfigReader(config)) if family is not None and family.unread is not None else ()
    backbone, head = ("model.", "lm_head.") if family is None else (f"{family.backbone}.", f"{family.head}.")

    def rename(stored: str) -> str | None:
        name = _of_language_model(stored)
        if name is None or _BUFFERS.fullmatch(name) or (tied and name == f"{head}weight"):
            return None
        full = name if name.startswith((backbone, head)) else backbone + name
        return None if full.rpartition(".")[0] in unread else full

    return rename


# --- files ----------------------------------------------------------------------------------------------------------


def _indexed_files(index: Path) -> dict[Path, frozenset[str]]:
    directory = index.parent
    suffix = ".safetensors" if index.name == INDEX else ".bin"
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index} has no weight_map. Download it again.")
    wanted: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(suffix):
            raise BadCheckpoint(f"{index} places {name!r} in {file!r}, which is no *{suffix} file beside it.")
        wanted.setdefault(file, set()).add(name)
    files = {directory / file: frozenset(names) for file, names in sorted(wanted.items())}
    for path, names in files.items():
        if not path.is_file():
            raise ModelNotFound(f"{index} names {path.name}, which is missing from {directory}. Download it too.")
        # A pickle's names are only known once it is loaded; missing tensors are detected then.
        if suffix == ".safetensors" and (missing := names - safetensors_names(path)):
            raise BadCheckpoint(f"{path} lacks the tensor {min(missing)!r} that {INDEX} promises. Download it again.")
    return files
