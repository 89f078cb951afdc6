"""Run as a program, without Triton's interpreter, which the tests' own process has: what is compiled ahead of a model's
first step, and what steps then launch. Reads requests from its input and prints what it found, both as JSON.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count, cycle, islice
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import triton.compiler
from triton import knobs
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key

from ostro.backends.cuda.choices import conceivable, known
from ostro.backends.cuda.graphs import ladder
from ostro.backends.cuda.part import GpuPart
from ostro.backends.cuda.precompile_process import compile_all, part_of, signatures
from ostro.backends.cuda.precompiling import Request
from ostro.backends.cuda.projections import PackedLinear
from ostro.backends.cuda.sampling import DrawnTokens, Sampler
from ostro.backends.cuda.step_plan import SamplerKind
from ostro.kernels.gpu.fp8 import fp8_small_linear
from ostro.kernels.gpu.packed_words import Packed
from ostro.kernels.gpu.signatures import build, compile_for, kernel_name, recorded
from ostro.kernels.gpu.small_batch import small_linear
from ostro.kernels.gpu.step_inputs import FIELDS, LENGTH, SAMPLER, unpack
from ostro.kernels.gpu.tilings import default_vector_tiling
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Linear

META = torch.device("meta")
# Prompt lengths: a few tokens, within one attention tile, and beyond.
PROMPTS = (5, 100, 1000, 3000)
QUICK = "_unpack_kernel"
# Formats of packed weights: bits, group, and whether groups have minima.
FORMS = ((4, 32, True), (4, 128, False), (8, 16, True), (8, 32, False))
NUMBERS = count(1)


class NotLaunched:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


@contextmanager
def noted_keys() -> Iterator[set[str]]:
    """The keys of what is compiled meanwhile in Triton's cache; nothing is."""
    keys: set[str] = set()

    def note(src: Any, target: Any, options: dict[str, Any]) -> NotLaunched:
        backend = make_backend(target)
        keys.add(get_cache_key(src, backend, backend.parse_options(dict(options)), env_vars={}))
        return NotLaunched()

    with patch.object(triton.compiler, "compile", note):
        yield keys


@contextmanager
def on_another_device() -> Iterator[None]:
    """Triton keeps what it has compiled by device."""
    number = next(NUMBERS)
    with patch.object(driver.active, "get_current_device", lambda: number):
        yield


def keys(request: Request) -> dict[str, int]:
    """The number of keys of signatures, and how many keys that launches on real memory look for are not among them."""
    ahead = signatures(request)
    with on_another_device(), noted_keys() as compiled:
        for each in ahead:
            build(each)
    with on_another_device(), noted_keys() as looked_for, torch.inference_mode():
        for launch in part_of(request, torch.device("cpu")).launches(request.settings.kernel_choices, request.gpu):
            launch()
    return {"signatures": len(ahead), "keys": len(compiled), "others": len(compiled ^ looked_for)}


def launched(request: Request) -> dict[str, object]:
    """The number of kernels that steps launch, and those that were not compiled ahead."""
    part, ahead = part_of(request, META), signatures(request)
    assert part.decoder is not None
    part.decoder.choices = known(request.settings.kernel_choices, request.gpu)
    if request.settings.kernel_choices == "auto":
        # As if by turns one candidate and another had been the fastest.
        matmuls = [each for each in part.decoder.matmuls if each not in part.decoder.choices]
        if found := [*conceivable(matmuls, request.gpu)]:
            part.decoder.choices |= found[0].of(matmuls[1::2]) | found[-1].of(matmuls[::2])
    most, vocab = request.settings.max_batch_seqs, part.model.shape.vocab_size
    sampler, drawn = Sampler(most, vocab, META), DrawnTokens(most, META)
    with torch.inference_mode():
        ran = recorded(steps(part, sampler, drawn, most))
    missed = [f"{kernel_name(each)}{json.loads(each)['constant_vals']}" for each in ran if each not in ahead]
    return {"kernels": len(ran), "missed": missed}


@contextmanager
def packed_weights() -> Iterator[None]:
    """Models have packed projections, each layer other forms, as in GGUF files that mix types."""

    def build(*args: Any, **settings: Any) -> Model:
        model = build_model(*args, **settings)
        assert isinstance(model, Decoder)
        for number, layer in enumerate(model.layers):
            forms = islice(cycle(FORMS), number, None)
            for parent in filter(None, (layer.mixer, layer.mlp)):
                for name, child in [*parent.named_children()]:
                    if isinstance(child, Linear):
                        setattr(parent, name, PackedLinear(child, empty_weight(child.shape, next(forms))))
        return model

    with patch("ostro.torch_models.build.build_model", build):
        yield


def empty_weight(shape: tuple[int, int], form: tuple[int, int, bool]) -> Packed:
    (outs, ins), (bits, group, has_minimum) = shape, form
    words, pairs = (torch.empty(outs, n, dtype=torch.int32, device=META) for n in (ins * bits // 32, ins // group))
    return Packed(words, pairs, bits, group, has_minimum)


def steps(part: GpuPart, sampler: Sampler, drawn: DrawnTokens, most: int) -> Iterator[Any]:
    def decode(size: int, kind: SamplerKind) -> None:
        sent = torch.empty(FIELDS, size, dtype=torch.int32, device=META)
        inputs = unpack(sent, drawn.tokens)
        logits = part.head(part._forward(inputs, part.attention.of_single_tokens(sent, inputs.slots)))
        sampler.draw(logits, sent[SAMPLER], drawn.tokens, drawn.errors, kind)

    def prompt(length: int) -> None:
        sent = torch.empty(FIELDS, length, dtype=torch.int32, device=META)
        inputs, tiles = unpack(sent, drawn.tokens), torch.empty(1, 4, dtype=torch.int32, device=META)
        attention = part.attention._of_tiles(part.attention.tables.on_device[:1], sent[LENGTH, :0], tiles, inputs.slots)
        part.head(part._forward(inputs, attention)[:1])

    for size in ladder(most):
        for truncated in (False, True):
            yield lambda size=size, truncated=truncated: decode(size, SamplerKind(truncated, penalties=False))
    for length in PROMPTS:
        yield lambda length=length: prompt(length)


def compiled(request: Request) -> dict[str, object]:
    """Outcomes of one signature that can be compiled and one that cannot."""
    good = next(each for each in signatures(request) if kernel_name(each).endswith(QUICK))
    # A kernel's blocks are powers of two.
    bad = json.dumps({**json.loads(good), "constant_vals": [255]})
    found = compile_all([bad, good], processes=2)
    hits: list[bool] = []
    with (
        on_another_device(),
        patch.object(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit)),
    ):
        build(good)
    return {"compiled": found.kernels, "failed": list(found.failed), "hits": hits}


def loads(width: int, dtype: torch.dtype) -> list[str]:
    """The instructions that load from memory in a matmul of one row."""
    x, weight = (
        torch.empty(1, width, dtype=torch.bfloat16, device=META),
        torch.empty(64, width, dtype=dtype, device=META),
    )
    tiling = default_vector_tiling(*weight.shape, gated=False)
    own = (
        partial(small_linear, x, weight)
        if dtype == torch.bfloat16
        else partial(fp8_small_linear, x, weight, torch.empty(64, device=META))
    )
    with on_another_device():
        (signature,) = recorded([partial(own, tiling=tiling)])
        module, _, name = kernel_name(signature).rpartition(".")
        text = getattr(import_module(module), name).preload(signature).asm["ptx"]
    return sorted(set(re.findall(r"ld\.global\.L1::evict_first[.\w:]*", text)))


def main() -> None:
    requests = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Request])
    compile_for(next(iter(requests.values())).gpu.capability)
    # First: after `noted_keys`, this process compiles nothing.
    tried = compiled(next(iter(requests.values())))
    # Widths that are multiples of 16 bytes, and of nothing more.
    read = {str(dtype): loads(width, dtype) for dtype, width in ((torch.bfloat16, 1048), (torch.float8_e4m3fn, 1040))}
    found = {name: {"keys": keys(each), "launched": launched(each)} for name, each in requests.items()}
    with packed_weights():
        packed = launched(next(iter(requests.values())))
    print(json.dumps({"models": found, "packed": packed, "compiled": tried, "loads": read}))


if __name__ == "__main__":
    main()
