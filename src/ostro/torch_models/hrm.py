"""The Hierarchical Reasoning Model, ACT v1: two stacks that refine two states, in upstream's and AI-OS's dialects.

    for each H cycle:   z_L = L(z_L + (z_H + embedded)), L_cycles times
                        z_H = H(z_H + z_L)

That is one outer step; the states carry over to the next. Attention is not causal: every position attends to every
other, so nothing can be cached from one token to the next.

On a CPU in float32, a sequence's result is bit-identical whatever else is in its batch. BLAS breaks that: it sums one
or a few rows in a different order than many. oneDNN's matmuls with a packed weight do not, and are faster than BLAS
from two rows on; nor does torch's fused attention, unlike the unfused one. None of this is documented, only measured,
so loading repeats the measurement with the number of threads used for serving. If it fails, or weights cannot be
packed, sequences run one by one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ostro.models.config import ConfigReader
from ostro.models.hrm_config import Dialect, HrmConfig
from ostro.models.rope_settings import RopeSettings
from ostro.torch_models.base import Module
from ostro.torch_models.hrm_layers import Level, StableLinear, Table
from ostro.torch_models.layers import parameter
from ostro.torch_models.loading import Weighted, fill, places_of
from ostro.torch_models.ragged import Ragged
from ostro.torch_models.rope import Rotary, Rotation

__all__ = ["Carry", "Dialect", "HrmConfig", "HrmModel", "build_hrm", "load_hrm"]

# AI-OS clamps embeddings and logits to these.
_EMBEDDING_LIMIT, _LOGIT_LIMIT = 10.0, 20.0
# Keeps the variance of the sum of two tables equal to that of one.
_POSITION_SCALE = 0.707106781
# The embedding that upstream reserves for "no particular puzzle".
_BLANK_PUZZLE = 0
# Sequence lengths for the self-test: few and many rows, odd and even, equal and unequal.
_TRIALS: tuple[tuple[int, ...], ...] = ((1,) * 16, (2, 2), (3,) * 7, (9, 1, 24), (24,) * 12, (5, 5, 8, 8, 8, 33))
# torch gives each thread at least this many elements of elementwise work.
_ELEMENTS_PER_THREAD = 32768
# A rounding difference shows up in a few elements at each cut, and not for all numbers, so these tests are repeated.
# Longer batches would slow down loading too much.
_ATTEMPTS, _MOST_TRIAL_ROWS = 3, 4096


@dataclass(slots=True)
class Carry:
    """The two states, [rows, hidden]."""

    z_h: Tensor
    z_l: Tensor

    def take(self, rows: Tensor) -> "Carry":
        return Carry(self.z_h[rows], self.z_l[rows])


class HrmModel(Module):
    """Parameters have their names in checkpoints. Call `pack` once they are filled.

    Rows follow a `Ragged` layout, whose lengths include the puzzle's positions, which precede the tokens.
    """

    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.config = config
        self.inner = _Inner(config)
        self.mixes_rows = False
        """Whether sequences share matmuls. If not, they run one by one, which is exact on any machine."""

    @torch.inference_mode()
    def pack(self) -> None:
        """Packs the matrices for matmuls in which rows do not affect each other. Freezes the weights.

        On a CPU in float32, this replaces the plain layout. Elsewhere nothing is packed, and batch invariance depends
        on the device's library.
        """
        packed = [module.try_pack() for module in self.modules() if isinstance(module, StableLinear)]
        like = self.inner.H_init
        exact = like.device.type == "cpu" and like.dtype == torch.float32
        self.mixes_rows = not exact or (all(packed) and self._rows_stand_alone())

    @torch.inference_mode()
    def embed(self, ids: Tensor, layout: Ragged, puzzles: Sequence[int] | None = None) -> Tensor:
        """[tokens] of all sequences, concatenated -> [rows, hidden].

        `puzzles` has one puzzle per sequence, if the model knows any; omitted, it means no particular puzzle.
        """
        config, inner = self.config, self.inner
        x = inner.embed_tokens(ids)
        if config.puzzle_len:
            x = inner.with_puzzles(puzzles or [_BLANK_PUZZLE] * len(layout.lengths), x, layout)
        if inner.embed_pos is not None:
            x = x.add_(inner.embed_pos(layout.positions)).mul_(_POSITION_SCALE)
        if config.embedding_scale != 1.0:
            x = x.mul_(config.embedding_scale)
        return x.clamp_(-_EMBEDDING_LIMIT, _EMBEDDING_LIMIT) if config.dialect == "aios" else x

    def start(self, layout: Ragged) -> Carry:
        """The initial states of sequences."""
        shape = (sum(layout.lengths), self.config.hidden_size)
        return Carry(self.inner.H_init.data.expand(shape), self.inner.L_init.data.expand(shape))

    @torch.inference_mode()
    def advance(self, carry: Carry, embedded: Tensor, layout: Ragged) -> Carry:
        """One outer step. Does not modify its arguments."""
        if self.mixes_rows or len(layout.lengths) == 1:
            return self._advance(carry, embedded, layout)
        parts = [
            self._advance(Carry(z_h, z_l), own, Ragged([len(own)], own.device))
            for z_h, z_l, own in zip(
                *(rows.split_with_sizes(layout.lengths) for rows in (carry.z_h, carry.z_l, embedded)), strict=True
            )
        ]
        return Carry(torch.cat([part.z_h for part in parts]), torch.cat([part.z_l for part in parts]))

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        """Rows of z_H -> logits, [rows, vocab], float32."""
        product = self.inner.lm_head
        rows = product(states) if self.mixes_rows else torch.cat([product(row[None]) for row in states])
        logits: Tensor = rows.float()
        return logits.clamp_(-_LOGIT_LIMIT, _LOGIT_LIMIT) if self.config.dialect == "aios" else logits

    @torch.inference_mode()
    def halting(self, carry: Carry, layout: Ragged) -> Tensor:
        """[sequences, 2], float32: scores for halting and for continuing."""
        return self.inner.q_head(carry.z_h[list(layout.starts)])

    def _advance(self, carry: Carry, embedded: Tensor, layout: Ragged) -> Carry:
        inner, config = self.inner, self.config
        rotation = inner.rotation(layout, embedded.dtype)
        z_h, z_l = carry.z_h, carry.z_l
        for _ in range(config.h_cycles):
            if config.dialect == "aios":
                z_l = inner.L_init.expand_as(z_h)
            injection = z_h + embedded
            for _ in range(config.l_cycles):
                z_l = inner.L_level(z_l, injection, rotation, layout)
            z_h = inner.H_level(z_h, z_l, rotation, layout)
        return Carry(z_h, z_l)

    def _rows_stand_alone(self) -> bool:
        """Self-test on a block and the head: are sequences in a batch bit-identical to sequences alone?"""
        block, head, rotation = self.inner.L_level.layers[0], self.inner.lm_head, self.inner.rotation
        generator, device = torch.Generator().manual_seed(0), torch.device("cpu")
        for wanted in (*_TRIALS, *_split_trials(self.config, torch.get_num_threads())):
            lengths = [min(length, self.config.seq_len) for length in wanted]
            layout = Ragged(lengths, device)
            x = torch.randn(sum(lengths), self.config.hidden_size, generator=generator)
            states, logits = block(x, rotation(layout, x.dtype), layout), head(x[list(layout.starts)])
            for sequence, length in enumerate(lengths):
                rows = slice(layout.starts[sequence], layout.starts[sequence] + length)
                alone = Ragged([length], device)
                own = block(x[rows], rotation(alone, x.dtype), alone)
                if not torch.equal(own, states[rows]) or not torch.equal(head(x[rows][:1])[0], logits[sequence]):
                    return False
        return True


def _split_trials(config: HrmConfig, threads: int) -> Iterator[tuple[int, ...]]:
    """Lengths of batches whose elementwise work torch splits into as many pieces as there are threads, and into one
    fewer: at least one of the two is odd, so that some cut falls inside a row and inside a SIMD vector.
    """
    width = config.inner_size * (config.experts_per_token or 1)
    for pieces in (threads - 1, threads):
        if pieces < 2:
            continue
        rows = (pieces - 1) * _ELEMENTS_PER_THREAD // width + 1
        rows += rows % pieces == 0
        if rows <= _MOST_TRIAL_ROWS:
            length = min(config.seq_len, max(3, rows // 6))
            yield from ((rows % length or length, *[length] * ((rows - 1) // length)),) * _ATTEMPTS


class _Inner(Weighted):
    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.H_init, self.L_init = parameter(size), parameter(size)
        self.embed_tokens = Table(config.vocab_size, size)
        self.embed_pos = Table(config.position_rows, size) if config.positions == "learned" else None
        self.puzzle_emb = _Puzzles(config) if config.puzzle_len else None
        self.H_level, self.L_level = Level(config, config.h_layers), Level(config, config.l_layers)
        self.lm_head = StableLinear(size, config.vocab_size)
        self.q_head = _QHead(size)
        self.num_positions = config.puzzle_len + config.seq_len
        settings = RopeSettings(ConfigReader({"rope_theta": config.rope_theta}), self.num_positions, self.num_positions)
        rotates = config.positions == "rope"
        self.rotary = Rotary(settings, head_dim=config.head_dim, max_seq_len=self.num_positions) if rotates else None
        self.whole: Rotation | None = None

    def rotation(self, layout: Ragged, dtype: torch.dtype) -> Rotation | None:
        """Looked up in a table for all positions: a cosine must not depend on which others are computed with it."""
        if self.rotary is None:
            return None
        if self.whole is None:
            self.whole = self.rotary(torch.arange(self.num_positions, device=self.H_init.device), dtype)
        return Rotation(self.whole.cos[layout.positions], self.whole.signed_sin[layout.positions])

    def with_puzzles(self, puzzles: Sequence[int], tokens: Tensor, layout: Ragged) -> Tensor:
        """Each sequence's tokens, preceded by its puzzle's embedding, zero-padded to whole positions."""
        assert self.puzzle_emb is not None
        numbers, size = self.puzzle_emb.weights[list(puzzles)], tokens.shape[1]
        padded = F.pad(numbers, (0, -numbers.shape[1] % size))
        is_token = layout.positions >= padded.shape[1] // size
        x = tokens.new_empty(len(is_token), size)
        x[is_token] = tokens
        x[~is_token] = padded.view(-1, size)
        return x


class _Puzzles(Weighted):
    def __init__(self, config: HrmConfig) -> None:
        super().__init__()
        self.weights = parameter(config.num_puzzles, config.puzzle_size)


class _QHead(Weighted):
    """Two scores per state. Summed row by row: a matmul's result would depend on the number of rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(2, size), parameter(2)

    def forward(self, states: Tensor) -> Tensor:
        products = states.float()[:, None] * self.weight.float()
        return products.sum(-1).add_(self.bias.float())


def build_hrm(config: HrmConfig, dtype: torch.dtype, device: torch.device | None = None) -> HrmModel:
    """The model, with parameters allocated on the device but not filled."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device or torch.device("cpu"):
            model = HrmModel(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().to(device)


def load_hrm(
    config: HrmConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    needs_q_head: bool = True,
) -> HrmModel:
    """Builds, fills and packs the model. A tensor that is missing, misshapen or unknown is an error that names it.

    Without `needs_q_head`, a q-head that the checkpoint lacks is all zeros: nothing may ask it.
    """
    model = build_hrm(config, dtype, device)
    fill(places_of(model), tensors if needs_q_head else _with_q_head(tensors, config.hidden_size))
    model.pack()
    return model


def _with_q_head(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with zeros for what is missing of the q-head."""
    missing = {"inner.q_head.weight": (2, size), "inner.q_head.bias": (2,)}
    for name, tensor in tensors:
        missing.pop(name, None)
        yield name, tensor
    yield from ((name, torch.zeros(shape)) for name, shape in missing.items())
