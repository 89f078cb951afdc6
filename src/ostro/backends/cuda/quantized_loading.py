"""Loads a quantised checkpoint onto a GPU with its projections as small as they are stored, where the kernels take
their form (`quantized_weights`).

The model is built without memory. Each projection gets its own once all of its parts have arrived, a few rows at a
time, so that it never exists in 16 bits unless it has to be widened.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ostro.backends.cuda.projections import Fp8Linear, PackedLinear, QuantizedLinear
from ostro.backends.cuda.quantize import has_fp8
from ostro.backends.cuda.quantized_weights import joined_form
from ostro.errors import BadCheckpoint
from ostro.kernels.gpu.fp8 import FP8, quantize_weight
from ostro.kernels.gpu.packed_words import Packed, pack_codes, pack_pairs
from ostro.models.tensor_errors import lacking, misshapen
from ostro.torch_models.decoder import Decoder, DecoderLayer
from ostro.torch_models.layers import LayerNorm, Projection
from ostro.torch_models.loading import Picked, Place, fill, places_of
from ostro.weights import Checkpoint
from ostro.weights.affine import Affine, Rows, affine_of, fits_halves
from ostro.weights.arrays import Weight, tensor_of
from ostro.weights.forms import Form
from ostro.weights.quantized.tiles import Tiled
from ostro.weights.quantized.weight import QuantizedWeight
from ostro.weights.read_ahead import run_ahead

# How many codes are unpacked at a time.
_CHUNK_VALUES = 1 << 22
# The most codes that share a 32-bit word along the rows.
_ROW_MULTIPLE = 8

_log = logging.getLogger(__name__)


def load_quantized(model: Decoder, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Fills a model that was built on the meta device."""
    loader = _Loader(model, dtype, device)
    others = {name: place for name, place in places_of(model).items() if name not in loader.waiting}
    fill(others, loader.watched(checkpoint.arrays()), prefix=f"{model.backbone_name}.")
    loader.finish()


class _Loader:
    def __init__(self, model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
        self._homes = {
            id(child): (parent, name, child)
            for layer in layers
            for parent in layer.modules()
            for name, child in parent.named_children()
            if isinstance(child, Projection)
        }
        self._allocate()
        self.waiting: dict[str, tuple[int, int]] = {}
        """Tensors of projections that have not arrived yet: which projection, and which part of it."""
        self._parts: dict[int, list[Weight | None]] = {}
        for key, (_, _, projection) in self._homes.items():
            self._parts[key] = [None] * len(projection.described.parts)
            for part, each in enumerate(projection.described.parts):
                self.waiting[f"{each.name}.weight"] = key, part
        self._names = dict(self.waiting)
        self._outcome: Counter[str] = Counter()

    def _allocate(self) -> None:
        """Allocates everything but the projections' matrices."""
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(module) not in self._homes or name != "weight":
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):
                # All buffers are computed on the CPU, except the zeros of a norm without a bias.
                assert not buffer.is_meta or isinstance(module, LayerNorm)
                own = torch.zeros_like(buffer, device=self._device) if buffer.is_meta else buffer.to(self._device)
                setattr(module, name, own)

    def watched(self, arrays: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Tensor]]:
        """Takes the projections' matrices out of the stream; passes on the rest."""
        for given, weight in arrays:
            name = given if given in self._names else f"{self._model.backbone_name}.{given}"
            if name not in self._names:
                yield given, tensor_of(weight)
                continue
            if name not in self.waiting:
                raise BadCheckpoint(f"The checkpoint holds tensor {given!r} twice. Fetch the model again.")
            key, part = self.waiting.pop(name)
            projection = self._homes[key][2]
            described = projection.described
            shape = (described.parts[part].rows, described.columns)
            asked = shape[::-1] if described.transposed else shape
            if weight.shape != asked:
                raise misshapen(given, weight.shape, asked)
            self._parts[key][part] = weight
            parts = [each for each in self._parts[key] if each is not None]
            if len(parts) == len(described.parts):
                self._place(key, parts)
                del self._parts[key]

    def finish(self) -> None:
        if self.waiting:
            raise lacking(set(self.waiting))
        _log.info("projections: %s", ", ".join(f"{count} {how}" for how, count in self._outcome.most_common()))

    def _place(self, key: int, parts: Sequence[Weight]) -> None:
        parent, name, projection = self._homes[key]
        made = self._kept(projection, parts)
        if made is None:
            self._widen(projection, parts)
            self._outcome["widened"] += 1
        else:
            setattr(parent, name, made)

    # ---- kept as they are

    def _kept(self, projection: Projection, parts: Sequence[Weight]) -> QuantizedLinear | None:
        codes = [affine_of(part) for part in parts]
        tiles = [_tiled(part) for part in parts]
        forms = [_form(*each) for each in zip(codes, tiles, strict=True)]
        form = joined_form(projection.described, forms)
        if form is None:
            return None
        if form.kind == "float" and not has_fp8(self._device):
            return None
        if form.kind == "float":
            return self._floats(projection, [each for each in tiles if each is not None])
        return self._packed(projection, [each for each in codes if each is not None], form)

    def _packed(self, projection: Projection, parts: Sequence[Affine], form: Form) -> PackedLinear | None:
        out_features, in_features = projection.shape
        has_minimum = any(part.has_minimum for part in parts)
        words = torch.empty(out_features, in_features * form.bits // 32, dtype=torch.int32, device=self._device)
        pairs = torch.empty(out_features, in_features // form.group, dtype=torch.int32, device=self._device)
        sizes = [part.shape[0] for part in parts]
        for part, own_words, own_pairs, order in zip(
            parts, words.split(sizes), pairs.split(sizes), _orders(projection), strict=True
        ):
            chunks = _chunks(part.shape)
            for rows, read in zip(chunks, run_ahead(partial(part.rows, rows) for rows in chunks), strict=True):
                found = _common(read, part, form, has_minimum=has_minimum)
                if not fits_halves(found):
                    return None
                own_words[rows] = pack_codes(torch.from_numpy(found.codes).to(self._device), form.bits, form.group)
                halves = (torch.from_numpy(each.astype(np.float16)) for each in (found.scales, found.seconds))
                own_pairs[rows] = pack_pairs(*halves).to(self._device)
            for index in (part.order, order):
                if index is not None:
                    at = torch.from_numpy(np.asarray(index)).to(self._device)
                    own_words.copy_(own_words[at])
                    own_pairs.copy_(own_pairs[at])
        self._outcome[f"in {form.format_name} with groups of {form.group}"] += 1
        return PackedLinear(projection, Packed(words, pairs, form.bits, form.group, has_minimum))

    def _floats(self, projection: Projection, parts: Sequence[Tiled]) -> Fp8Linear:
        small = torch.empty(projection.shape, dtype=FP8, device=self._device)
        scale = torch.empty(projection.shape[0], dtype=torch.float32, device=self._device)
        sizes = [part.codes.shape[0] for part in parts]
        exact = True
        for part, own, own_scale, order in zip(
            parts, small.split(sizes), scale.split(sizes), _orders(projection), strict=True
        ):
            rows = part.row_scales()
            if rows is not None and part.codes.format == "F8_E4M3":
                own.view(torch.uint8).copy_(torch.from_numpy(part.codes.raw).view(own.shape))
                own_scale.copy_(torch.from_numpy(rows))
            else:
                exact = False
                chunks = _chunks(own.shape)
                for some, values in zip(chunks, run_ahead(partial(part.decode, rows) for rows in chunks), strict=True):
                    rounded, by = quantize_weight(torch.from_numpy(values).to(self._device))
                    own[some], own_scale[some] = rounded, by
            if order is not None:
                at = torch.from_numpy(np.asarray(order)).to(self._device)
                own.view(torch.uint8).copy_(own.view(torch.uint8)[at])
                own_scale.copy_(own_scale[at])
        self._outcome["in fp8" if exact else "in fp8, requantised with one scale per output"] += 1
        return Fp8Linear(projection, small, scale)

    # ---- widened

    def _widen(self, projection: Projection, parts: Sequence[Weight]) -> None:
        wide = torch.empty(projection.shape, dtype=self._dtype, device=self._device)
        projection.weight = nn.Parameter(wide, requires_grad=False)
        places = projection.places("")
        for part, weight in zip(projection.described.parts, parts, strict=True):
            places[f"{part.name}.weight"].fill(tensor_of(weight))


def _tiled(weight: Weight) -> Tiled | None:
    source = weight.source if isinstance(weight, QuantizedWeight) else None
    return source if isinstance(source, Tiled) else None


def _form(codes: Affine | None, tiles: Tiled | None) -> Form | None:
    if codes is not None:
        return codes.form
    return None if tiles is None else Form("float", 8, tiles.codes.shape[1])


def _orders(projection: Projection) -> list[Sequence[int] | None]:
    """For each part, which stored row each of its rows is; None if they are stored in order."""
    places = projection.places("")
    found = [places[f"{part.name}.weight"] for part in projection.described.parts]
    return [_order(place) for place in found]


def _order(place: Place) -> Sequence[int] | None:
    return place.taken.rows if isinstance(place.taken, Picked) else None


def _common(rows: Rows, part: Affine, form: Form, *, has_minimum: bool) -> Rows:
    """In the form that a projection's parts have in common."""
    codes, scales, seconds = rows
    if has_minimum and not part.has_minimum:
        seconds = -seconds * scales
    times = part.form.group // form.group
    return Rows(np.ascontiguousarray(codes), np.repeat(scales, times, axis=1), np.repeat(seconds, times, axis=1))


def _chunks(shape: Sequence[int]) -> list[slice]:
    rows, columns = shape
    step = max(1, _CHUNK_VALUES // columns // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
