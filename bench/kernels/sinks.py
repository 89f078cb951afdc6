"""Attention sinks on the GPU, at gpt-oss-20b's sizes: checked against the fp32 twin, then timed with sinks and without.

python bench/kernels/sinks.py
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from attention import checked, relative_error, replay_microseconds
from torch import Tensor

from ostro.kernels.gpu.decode_attention import DecodeScratch, decode_attention, plan_decode, reference_attention
from ostro.kernels.gpu.prefill_attention import Chunk, prefill_attention, prefill_tiles, tokens_in_tile, tuning_for
from ostro.models.architecture import AttentionSpec

HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 64, 64
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
Attend = Callable[[Tensor | None], Tensor]


def pages(lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the pages of each row, which no other row has."""
    needed = -(-max(lens) // PAGE)
    tables = torch.randperm(len(lens) * needed, device=DEVICE).int().view(len(lens), needed)
    keys, values = torch.randn(2, tables.numel(), KV_HEADS, PAGE, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    return keys, values, tables


def compared(name: str, attend: Attend, expected: Callable[[Tensor | None], Tensor]) -> None:
    sinks = 2 * torch.randn(HEADS, device=DEVICE, dtype=DTYPE)
    spent = []
    for given in (None, sinks):
        error = relative_error(attend(given), expected(given))
        checked(error)
        spent.append(replay_microseconds([partial(attend, given)], 20))
    print(f"{name}: {spent[0]:.1f} us, with sinks {spent[1]:.1f} us, error {error:.1e}", flush=True)


def decode(rows: int, length: int, window: int | None) -> None:
    spec = AttentionSpec(scale=HEAD_DIM**-0.5, window=window)
    keys, values, tables = pages([length] * rows)
    q = torch.randn(rows, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    scratch = DecodeScratch(rows, HEADS, KV_HEADS, HEAD_DIM, PAGE, DEVICE, windows=(window,))
    plan_decode(torch.full((rows,), length, dtype=torch.int32, device=DEVICE), scratch, window)
    out = torch.empty_like(q)

    def expected(sinks: Tensor | None) -> Tensor:
        single = [
            reference_attention(q[row : row + 1], keys, values, tables[row], length - 1, spec, sinks)
            for row in range(rows)
        ]
        return torch.cat(single)

    attend = partial(decode_attention, q, keys, values, tables, scratch, out, spec)
    compared(f"decode {rows} x {length}, window {window}", attend, expected)


def prefill(count: int, length: int, window: int | None) -> None:
    spec, tuning = AttentionSpec(scale=HEAD_DIM**-0.5, window=window), tuning_for(DTYPE)
    keys, values, tables = pages([length] * count)
    chunks = [Chunk(row, row * length, 0, length) for row in range(count)]
    listed = prefill_tiles(chunks, tokens_in_tile(HEADS, KV_HEADS, tuning))
    tiles = torch.tensor(listed, dtype=torch.int32, device=DEVICE)
    q = torch.randn(count * length, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)

    def expected(sinks: Tensor | None) -> Tensor:
        spans = [slice(chunk.offset, chunk.offset + length) for chunk in chunks]
        return torch.cat(
            [reference_attention(q[span], keys, values, tables[row], 0, spec, sinks) for row, span in enumerate(spans)]
        )

    attend = partial(prefill_attention, q, keys, values, tables, tiles, out, spec, None)
    compared(f"prefill {count} x {length}, window {window}", attend, expected)


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), flush=True)
    for window in (None, 128):
        for rows, length in ((1, 600), (8, 1000), (256, 1000)):
            decode(rows, length, window)
        prefill(8, 1024, window)


if __name__ == "__main__":
    main()
