"""Bans tokens in logits on the device, inside a CUDA graph: what a grammar does not allow next.

    words   [masks, words] int32   token i is bit i % 32 of word i // 32
    rows    [batch] int32          which mask each row of the logits has; -1 for none

The plain twin is `ban_plain`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BITS = 32

_BLOCK = 1024


def ban_tokens(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    """Subtracts infinity, in place, where a row's mask has no bit. NaN and infinite logits then still show as such."""
    batch, vocab = logits.shape
    assert logits.stride(1) == words.stride(1) == 1
    assert words.shape[1] * WORD_BITS >= vocab
    _ban_kernel[(triton.cdiv(vocab, _BLOCK), batch)](
        logits, logits.stride(0), words, words.stride(0), rows, vocab, block=_BLOCK, num_warps=4
    )


def ban_plain(logits: Tensor, words: Tensor, rows: Tensor) -> None:
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    banned = (words.unsqueeze(-1) >> bits & 1 == 0).flatten(1)[:, : logits.shape[1]]
    for row, mask in enumerate(rows.tolist()):
        if mask >= 0:
            logits[row, banned[mask]] -= torch.inf


@triton.jit(do_not_specialize=["vocab"])
def _ban_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    words: tl.tensor,
    words_stride: tl.tensor,
    rows: tl.tensor,
    vocab: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    mask = tl.load(rows + row).to(tl.int64)
    if mask < 0:
        return
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < vocab
    word = tl.load(words + mask * words_stride + at // 32, mask=inside, other=-1)
    banned = inside & (((word >> (at % 32)) & 1) == 0)
    places = logits + row * logits_stride + at
    scores = tl.load(places, mask=banned, other=0.0).to(tl.float32)
    tl.store(places, scores - float("inf"), mask=banned)
