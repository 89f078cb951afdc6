"""How matmuls of few rows are split into programs, and which ways may be fastest for a shape.

The cost model only ranks: among the few best, a measurement decides (`backends.cuda.choices`). Plain arithmetic that
needs neither torch nor Triton.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that tilings are chosen for: each applies to fewer rows as well, down to the next smaller one."""
MOST_ROWS = ROWS[-1]
MOST_VECTOR_ROWS = 4
MOST_SLICE_ROWS = 16
SLICE_WIDTH = 32
"""Inputs that a warp of the slice kernel multiplies at a time."""
EpilogueKind: TypeAlias = Literal["plain", "added", "activated", "gated"]
"""What a matmul's kernel can do with its result: store it, add it to the residual, apply an activation, or gate."""

_SHARED_MEMORY = 220 << 10
_MOST_STAGES, _ENOUGH_STAGES = 10, 4
_MOST_SPLITS = 8
# The copy engine needs rows whose bytes are a multiple of this.
_ALIGNMENT = 16
# Per multiprocessor, as measured on an H200: bytes per µs from memory, and from the L2 cache, where the inputs are;
# floating-point operations per µs; bytes in flight that saturate memory.
_FROM_MEMORY, _FROM_CACHE, _OPERATIONS, _IN_FLIGHT = 32_600.0, 80_000.0, 5.9e6, 33_000.0
# The µs that it takes to add up splits, besides writing and reading them.
_JOINING = 1.3
_REGISTERS_A_THREAD, _SUMS_A_THREAD = 72, 128
# Weights that a thread holds, by warps: 16 warps have half as many registers per thread as 8.
_SLICE_REGISTERS = {4: 96, 8: 96, 16: 64}
# Where slices were the fastest on an H200: up to so many bytes of weights per multiprocessor, nearly all of which are
# then in registers before the wait; and with so many outputs per program and warps, by number of rows.
_SLICED_BYTES = 110_000
_FASTEST_SLICES = {8: ((16, 4), (16, 8), (8, 4)), 16: ((16, 4),)}
_FASTEST_GATED_SLICES = ((8, 4),)
# Programs per multiprocessor that saturate memory: one can read faster than its share.
_ENOUGH = 0.5
# Candidates whose predicted time is beyond this multiple of the best are not worth compiling.
_WORTH_TRYING = 1.3


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """For the vector kernel. Powers of two."""

    outs: int
    """Outputs per program; with gate and up, this many of each."""
    ins: int
    """Inputs read at a time."""
    warps: int


@dataclass(frozen=True, slots=True)
class DotTiling:
    """For the tensor cores' kernel. Powers of two, except for the stages."""

    outs: int
    """Outputs per program; with gate and up, this many of each."""
    ins: int
    """Inputs read at a time."""
    warps: int
    stages: int
    """Blocks of inputs and weights in flight at a time."""
    splits: int = 1
    """Programs that share one output's inputs (not for gated matmuls). Their sums are added in a fixed order."""
    held: int = 0
    """Blocks of weights loaded to registers before waiting for the previous kernel."""


@dataclass(frozen=True, slots=True)
class SliceTiling:
    """For the slice kernel, which computes outputs from all of their inputs at once."""

    outs: int
    """Outputs per program; with gate and up, this many of each. A power of two, at least 8."""
    ins: int
    """Inputs in registers at a time: any multiple of SLICE_WIDTH for each warp."""
    warps: int
    """A power of two."""
    folds: bool = False
    """Whether it norms its inputs itself, so that no kernel before it has to."""


Tiling: TypeAlias = VectorTiling | DotTiling | SliceTiling
_Ranked: TypeAlias = VectorTiling | DotTiling
"""Tilings that the cost model knows."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul, by what its speed depends on besides the number of rows."""

    out_features: int
    """The weight's rows: with gate and up, both."""
    in_features: int
    bits: int
    epilogue: EpilogueKind = "plain"

    @property
    def is_gated(self) -> bool:
        return self.epilogue == "gated"

    @property
    def outs(self) -> int:
        """Results per row."""
        return self.out_features // self._copies

    @property
    def _copies(self) -> int:
        return 2 if self.is_gated else 1

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * self.bits // 8


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """A GPU, as far as tilings depend on it."""

    number: int
    shared_memory: int
    """Bytes of shared memory that one program can have."""


def block_rows(rows: int) -> int:
    """The height of the one tile that the tensor cores' kernel has for all rows."""
    return max(16, power_of_two(rows))


def slice_rows(rows: int) -> int:
    """The height of the one tile that the slice kernel has for all rows."""
    return 8 if rows <= 8 else 16


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def binary_of(matmul: Matmul, rows: int, tiling: Tiling) -> tuple[object, ...]:
    """A key that is equal for matmuls that share one compiled kernel, biases and norms aside."""
    # Triton specialises kernels on numbers that are multiples of 16.
    aligned = matmul.outs % 16 == 0, matmul.in_features % 32 == 0
    if isinstance(tiling, VectorTiling):
        return (
            matmul.epilogue,
            tiling,
            matmul.bits,
            rows,
            matmul.in_features,
            matmul.outs % tiling.outs == 0,
            aligned,
        )
    if isinstance(tiling, SliceTiling):
        loops, evens = matmul.in_features > tiling.ins, (matmul.outs % tiling.outs, matmul.in_features % tiling.ins)
        return matmul.epilogue, tiling, matmul.bits, slice_rows(rows), loops, *(not each for each in evens), aligned
    blocks = -(-matmul.in_features // (tiling.splits * tiling.ins))
    held = min(tiling.held, blocks)
    return matmul.epilogue, tiling, matmul.bits, block_rows(rows), held, held < blocks, aligned


def default_tiling(rows: int, out_features: int, in_features: int, *, gated: bool, bits: int = 16) -> _Ranked:
    """The tiling where none was chosen. `out_features` counts the weight's rows, both gate and up."""
    if rows == 1:
        return default_vector_tiling(out_features, in_features, gated=gated)
    return default_dot_tiling(rows, out_features // (2 if gated else 1), in_features, gated=gated, bits=bits)


def default_vector_tiling(out_features: int, in_features: int, *, gated: bool) -> VectorTiling:
    """For one row. `out_features` counts the weight's rows, both gate and up."""
    width = power_of_two(in_features)
    if in_features <= 3072:  # A row of weights fits into a warp's registers.
        warps = 4 if out_features >= 4096 else 2
        return VectorTiling(outs=warps, ins=min(width, 256), warps=warps)
    # About 16 KB of weights per program: a few programs per multiprocessor keep enough loads in flight.
    outs = max(1, 8192 // width) // (2 if gated and width < 8192 else 1)
    warps = 8 if in_features > 8192 else 4
    return VectorTiling(outs=outs, ins=min(width, 256 * warps), warps=warps)


def default_dot_tiling(
    rows: int, outs: int, in_features: int, *, gated: bool, bits: int = 16, multiprocessors: int = 132
) -> DotTiling:
    """Enough programs for every multiprocessor, and enough loads in flight to fill its shared memory. `outs` counts
    results, half the weight's rows if gated.
    """
    ins = min(128 if rows <= 64 or bits == 8 else 64, power_of_two(max(in_features, 32)))
    programs = -(-outs // 64)
    splits = 1
    while not gated and splits < 8 and programs * splits < 0.7 * multiprocessors and in_features >= 4 * ins * splits:
        splits *= 2
    block = bits // 8 * ins * (64 * (2 if gated else 1) + block_rows(rows))
    memory = _SHARED_MEMORY if programs * splits <= multiprocessors else _SHARED_MEMORY // 2
    return DotTiling(64, ins, 4, stages=max(2, min(_MOST_STAGES, memory // block)), splits=splits)


def fits(matmul: Matmul, rows: int, tiling: Tiling, device: Multiprocessors) -> bool:
    """Whether the kernel can run with this tiling for up to `rows` rows."""
    if isinstance(tiling, SliceTiling):
        return _slice_fits(matmul, rows, tiling)
    numbers = [tiling.outs, tiling.ins, tiling.warps]
    if isinstance(tiling, DotTiling):
        numbers.append(tiling.splits)
    if any(number < 1 or number & (number - 1) for number in numbers):
        return False
    if isinstance(tiling, VectorTiling):
        return rows <= MOST_VECTOR_ROWS
    return (
        rows > 1
        and tiling.stages >= 1
        and tiling.held >= 0
        and min(tiling.outs, tiling.ins) >= 16
        and (tiling.splits == 1 or not matmul.is_gated)
        and matmul.in_features * matmul.bits // 8 % _ALIGNMENT == 0
        and shared_memory(matmul, rows, tiling) <= device.shared_memory
    )


def _slice_fits(matmul: Matmul, rows: int, tiling: SliceTiling) -> bool:
    powers = all(number > 0 and number & (number - 1) == 0 for number in (tiling.outs, tiling.warps))
    return (
        1 < rows <= MOST_SLICE_ROWS
        and matmul.bits == 16
        and powers
        and tiling.outs >= 8
        and tiling.ins > 0
        and tiling.ins % (SLICE_WIDTH * tiling.warps) == 0
    )


def shared_memory(matmul: Matmul, rows: int, tiling: DotTiling) -> int:
    """Bytes per program: blocks in flight, and held weights, which the tensor cores read from there as well."""
    weights = matmul.bits // 8 * tiling.ins * tiling.outs * (2 if matmul.is_gated else 1)
    inputs = matmul.bits // 8 * tiling.ins * block_rows(rows)
    blocks = -(-matmul.in_features // (tiling.splits * tiling.ins))
    # Without a loop, nothing but held blocks is in flight.
    in_flight = tiling.stages if blocks > tiling.held else 0
    return (in_flight + min(tiling.held, blocks)) * (weights + inputs)


def candidates(matmul: Matmul, rows: int, device: Multiprocessors, most: int = 2) -> tuple[_Ranked, ...]:
    """The tilings to try for up to `rows` rows, no two alike: first the default for one row, then the likeliest. None
    if only the library can do it.
    """
    times = {
        each: predicted_time(matmul, rows, each, device)
        for each in _possible(matmul, rows, device)
        if fits(matmul, rows, each, device)
    }
    bound = _WORTH_TRYING * min(times.values(), default=0.0)
    worth = sorted((each for each in times if times[each] <= bound), key=times.__getitem__)
    if rows == 1:
        worth.insert(0, default_vector_tiling(matmul.out_features, matmul.in_features, gated=matmul.is_gated))
    unlike: dict[object, _Ranked] = {}
    for each in worth:
        unlike.setdefault(_likeness(each), each)
    return tuple(unlike.values())[:most]


def _likeness(tiling: _Ranked) -> object:
    """A key that is equal for tilings of about the same speed, or whose difference the cost model knows."""
    if isinstance(tiling, VectorTiling):
        return tiling.outs / tiling.warps, tiling.ins
    return tiling.outs, tiling.splits


def predicted_time(matmul: Matmul, rows: int, tiling: _Ranked, device: Multiprocessors) -> float:
    """In µs. Only good for comparing tilings of one matmul."""
    copies, number, size = 2 if matmul.is_gated else 1, device.number, matmul.bits / 8
    tiles = -(-matmul.outs // tiling.outs)
    if isinstance(tiling, VectorTiling):
        programs, joining, operations = tiles, 0.0, 0.0
        held = min(256 * 32 * tiling.warps, int(tiling.outs * copies * matmul.in_features * size))
        # Registers limit how many programs a multiprocessor runs at a time.
        places, in_flight = number * max(1, 16 // tiling.warps), float(held)
        cached = rows * matmul.in_features * size * tiles
    else:
        programs = tiles * tiling.splits
        in_flight = (tiling.stages + tiling.held) * size * tiling.ins * tiling.outs * copies
        places = number * max(1, device.shared_memory // max(1, shared_memory(matmul, rows, tiling)))
        sums = 4 * tiling.splits * block_rows(rows) * tiling.outs
        joining = _JOINING + sums / _FROM_MEMORY if tiling.splits > 1 else 0.0
        cached = block_rows(rows) * matmul.in_features * size * tiles
        operations = 2.0 * block_rows(rows) * matmul.out_features * matmul.in_features
    fill = min(1.0, in_flight * min(programs, places) / (_IN_FLIGHT * number), programs / (_ENOUGH * number))
    read = matmul.weight_bytes / (_FROM_MEMORY * number * fill) * _last_wave(programs, places)
    computed = operations / (_OPERATIONS * number) * _last_wave(programs, number)
    return max(read, computed, cached / (_FROM_CACHE * number)) + joining


def _last_wave(programs: int, places: int) -> float:
    """How much longer the last wave of programs makes it take by leaving places empty. With fewer programs than places,
    not at all.
    """
    return max(1.0, -(-programs // places) * places / programs) if programs > places else 1.0


def _possible(matmul: Matmul, rows: int, device: Multiprocessors) -> Iterator[_Ranked]:
    if rows == 1:
        yield from _vector_tilings(matmul)
    elif matmul.bits <= 16:
        # Tensor cores take no wider numbers.
        yield from _dot_tilings(matmul, rows, device)


def _vector_tilings(matmul: Matmul) -> Iterator[VectorTiling]:
    own_row = ((4, 256, 4), (8, 256, 8), (8, 256, 4), (4, 256, 2), (2, 512, 2))
    along_a_row = ((2, 1024, 4), (1, 1024, 4), (2, 2048, 8), (1, 2048, 8))
    copies = 2 if matmul.is_gated else 1
    for outs, ins, warps in own_row + along_a_row:
        weights_a_thread = copies * outs * matmul.in_features * matmul.bits / 32 / (32 * warps)
        if ins <= power_of_two(matmul.in_features) and weights_a_thread <= _REGISTERS_A_THREAD:
            yield VectorTiling(outs, ins, warps)


def slice_tilings(matmul: Matmul) -> Iterator[SliceTiling]:
    """Those whose weights fit into registers: of all inputs or, beyond that, of groups of them, two at a time."""
    copies = 2 if matmul.is_gated else 1
    for outs, warps in ((16, 4), (16, 8), (8, 8), (8, 4), (32, 8), (16, 16), (8, 16)):
        most = int(_SLICE_REGISTERS[warps] // (copies * outs * matmul.bits / 32))
        chunks = -(-matmul.in_features // (SLICE_WIDTH * warps))
        if most >= 2 and chunks >= 2:
            yield SliceTiling(outs, _group(chunks, most) * SLICE_WIDTH * warps, warps)


def slice_candidates(matmul: Matmul, rows: int, device: Multiprocessors, most: int = 2) -> tuple[SliceTiling, ...]:
    """The slices to try for up to `rows` rows, besides `candidates`. All hold all of their inputs at once, and those of
    gated matmuls norm them.
    """
    if rows not in _FASTEST_SLICES or matmul.weight_bytes > _SLICED_BYTES * device.number:
        return ()
    fastest = _FASTEST_GATED_SLICES if matmul.is_gated else _FASTEST_SLICES[rows]
    whole = {
        (each.outs, each.warps): replace(each, folds=matmul.is_gated)
        for each in slice_tilings(matmul)
        if each.ins >= matmul.in_features and fits(matmul, rows, each, device)
    }
    return tuple(whole[each] for each in fastest if each in whole)[:most]


def _group(chunks: int, most: int) -> int:
    """How many chunks are held at a time: all, or as many as two of the groups may have. Equal groups need no masks."""
    if chunks <= most:
        return chunks
    fewest = -(-chunks // (most // 2))
    groups = next((each for each in range(fewest, fewest + 3) if chunks % each == 0), fewest)
    return -(-chunks // groups)


def _dot_tilings(matmul: Matmul, rows: int, device: Multiprocessors) -> Iterator[DotTiling]:
    copies, sums = 2 if matmul.is_gated else 1, block_rows(rows)
    # Among equally good ones, the first is preferred. For few rows, wide blocks were always the fastest.
    widths = (128,) if rows <= 64 else (64, 128)
    for outs, ins, warps in itertools.product((64, 128), widths, (4, 8)):
        tiles = -(-matmul.outs // outs)
        for splits in _splits(matmul, tiles, ins, device):
            # Beside the sums, what they are added to is in registers: the stream, or other splits' sums.
            beside = 2 if splits > 1 or matmul.epilogue == "added" else 1
            sums_a_thread = beside * copies * outs * sums / (32 * warps)
            # No more threads than needed.
            if sums_a_thread > _SUMS_A_THREAD or (warps == 8 and sums_a_thread <= _SUMS_A_THREAD / 2):
                continue
            # Where a second program, or for few rows one of the next kernel, finds room beside this one, it loads its
            # weights meanwhile.
            block = matmul.bits // 8 * ins * (outs * copies + sums)
            stages, half = device.shared_memory // block, device.shared_memory // 2 // block
            if tiles * splits > device.number:
                stages = half
            elif rows <= 16:
                stages = min(stages, max(_ENOUGH_STAGES, half))
            if stages >= 2:
                yield DotTiling(outs, ins, warps, stages=min(_MOST_STAGES, stages), splits=splits)


def _splits(matmul: Matmul, tiles: int, ins: int, device: Multiprocessors) -> Iterator[int]:
    """Numbers of splits, until there are enough programs or one would have no work."""
    splits = 1
    while splits == 1 or (
        splits <= _MOST_SPLITS
        and not matmul.is_gated
        and tiles * splits // 2 < device.number
        and _all_have_work(matmul.in_features, ins, splits)
    ):
        yield splits
        splits *= 2


def _all_have_work(in_features: int, ins: int, splits: int) -> bool:
    """Whether every split has at least two blocks of inputs."""
    blocks = -(-in_features // (splits * ins))
    return blocks >= 2 and (splits - 1) * blocks * ins < in_features
