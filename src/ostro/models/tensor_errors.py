"""Tensors that a checkpoint may contain besides weights, and errors for those that do not fit. Imports no torch."""

import re
from collections.abc import Collection, Sequence

from ostro.errors import BadCheckpoint

# Ignored if the model has no place for them: the copy of a tied head, and leftovers in old checkpoints, namely rope
# tables (Llama) and causal masks (GPT-2, GPT-NeoX).
REDUNDANT = re.compile(r"(lm_head|embed_out)\.weight|(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")


def no_place(name: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"The checkpoint holds a tensor {name!r} that its architecture has no place for, or holds it twice; "
        "its config may belong to another model."
    )


def misshapen(name: str, shape: Sequence[int], asked: Sequence[int]) -> BadCheckpoint:
    return BadCheckpoint(
        f"Tensor {name!r} has shape {tuple(shape)}, but its config asks for {tuple(asked)}; "
        "they may belong to different models."
    )


def not_floats(name: str, dtype: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"Tensor {name!r} holds {dtype}, not floating-point numbers: the checkpoint is quantised in a way that its "
        "config does not name. Fetch the unquantised model."
    )


def not_finite(name: str) -> BadCheckpoint:
    return BadCheckpoint(f"Tensor {name!r} holds NaN or infinity: the checkpoint is damaged. Download it again.")


def lacking(names: Collection[str]) -> BadCheckpoint:
    some = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    return BadCheckpoint(f"The checkpoint lacks {len(names)} tensors ({some}); fetch the model again.")
