"""A model of which only config.json is known, as a Checkpoint: its files would hold the tensors that the description
lists. Planning reads it; it has no weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Never, Self

from ostro.errors import BadRequest, ModelError, UnsupportedModel
from ostro.formats.gguf_header import GGML_TYPES
from ostro.models.architecture import Architecture, StoredTensor
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.weights.forms import GGUF_FORMS
from ostro.weights.pooling import Pooling
from ostro.weights.stored import Stored, TensorHeader

if TYPE_CHECKING:
    import torch

    from ostro.weights.arrays import Weight
    from ostro.weights.slices import SlicedWeight

_BITS: Mapping[str, float] = {
    **{each.name: 8 * each.block_bytes / each.block_size for each in GGML_TYPES.values()},
    "BF16": 16,
    "U8": 8,
}
# Hub models are split into files of about this size.
_MOST_FILE = 5 << 30
_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The number formats of a model's files, by GGUF's names. GGUF files and Hub checkpoints of one format have these;
    files that mix formats, such as Q4_K_M, are not described.
    """

    matrices: str = "BF16"
    embedding: str = "BF16"
    vectors: str = "BF16"
    in_one_file: bool = False

    def __post_init__(self) -> None:
        for name in (self.matrices, self.embedding, self.vectors):
            if name not in _BITS:
                raise BadRequest(f"There is no number format {name!r}. GGUF's names are known, such as Q8_0.")


@dataclass(frozen=True, slots=True)
class DescribedCheckpoint:
    name: str
    config: Mapping[str, object]
    headers: Stored

    @classmethod
    def of(cls, name: str, config: Mapping[str, object], formats: Formats | None = None) -> Self:
        """Experts are in MXFP4 if the config says so. Raises as `models.registry.describe` does, and UnsupportedModel
        for a model whose tensors do not follow from its config.
        """
        return cls(name, config, _stored(name, config, formats or Formats()))

    @property
    def path(self) -> Path:
        return Path(self.name)

    @property
    def generation_config(self) -> Mapping[str, object]:
        return {}

    @property
    def pooling(self) -> Pooling | None:
        return None

    @property
    def tokenizer_path(self) -> Path:
        return self.path

    @property
    def files(self) -> list[Path]:
        return []

    def stored(self) -> Stored:
        return self.headers

    def arrays(self) -> Iterator[tuple[str, "Weight"]]:
        self._refuse()

    def slices(self) -> Iterator[tuple[str, "SlicedWeight"]]:
        self._refuse()

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        self._refuse()

    def _refuse(self) -> Never:
        raise ModelError(f"{self.name} is a config without weights, which can be planned but not loaded.")


def _stored(name: str, config: Mapping[str, object], formats: Formats) -> Stored:
    described, quantization = describe(config), config.get("quantization_config")
    if not isinstance(described, Architecture | Encoder):
        raise UnsupportedModel(f"{name} is neither a decoder nor an encoder whose tensors follow from its config.")
    if quantization is None:
        tensors = [_header(each, described, formats) for each in described.tensors()]
        return _whole(tensors, tensors, formats)
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "mxfp4":
        raise UnsupportedModel(f"{name}: of quantised models, only those in MXFP4 follow from their config.")
    # Imports numpy.
    from ostro.weights.quantized import read_scheme

    parts = [part for each in described.tensors() for part in _mxfp4_parts(each, described, formats)]
    scheme = read_scheme(quantization)
    return replace(_whole(list(scheme.headers(parts)), parts, formats), quantization=scheme.label)


def _whole(tensors: list[TensorHeader], parts: list[TensorHeader], formats: Formats) -> Stored:
    """`parts` are what the files hold."""
    size = sum(int(part.values * _BITS[part.format] // 8) for part in parts)
    return Stored(tensors=tensors, file_bytes=size, largest_file=size if formats.in_one_file else min(size, _MOST_FILE))


def _header(tensor: StoredTensor, described: Architecture | Encoder, formats: Formats) -> TensorHeader:
    if len(tensor.shape) < 2:
        return TensorHeader(tensor.name, tensor.shape, formats.vectors)
    embedding = described.embedding.name if isinstance(described, Architecture) else described.embedding.words
    is_embedding = tensor.name == f"{embedding}.weight"
    stored = formats.embedding if is_embedding else formats.matrices
    return TensorHeader(tensor.name, tensor.shape, stored, form=GGUF_FORMS.get(stored))


def _mxfp4_parts(tensor: StoredTensor, described: Architecture | Encoder, formats: Formats) -> Iterator[TensorHeader]:
    """A stack of experts' matrices is stored as two tensors."""
    if not (tensor.stacked and len(tensor.shape) > 2):
        yield _header(tensor, described, formats)
        return
    experts, columns, rows = tensor.shape
    groups = columns // _BLOCK
    yield TensorHeader(f"{tensor.name}_blocks", (experts, rows, groups, _BLOCK // 2), "U8")
    yield TensorHeader(f"{tensor.name}_scales", (experts, rows, groups), "U8")
