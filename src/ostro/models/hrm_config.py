"""A Hierarchical Reasoning Model's settings, read from a checkpoint's config. Knows no tensors and no files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ostro.errors import BadCheckpoint, BadRequest, UnsupportedModel
from ostro.models.architecture import ModelShape
from ostro.models.config import (
    EPS,
    MOST_CYCLES,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_INNER,
    MOST_LAYERS,
    MOST_VOCAB,
    THETA,
    ConfigReader,
)

Dialect = Literal["upstream", "aios"]
Positions = Literal["rope", "learned"]
DIALECTS: tuple[Dialect, ...] = ("upstream", "aios")
MODEL_TYPE = "hrm_act_v1"
SETTINGS_FILES = "settings_files"
"""The config key that names the source files, for errors."""
_POSITIONS: tuple[Positions, ...] = ("rope", "learned")
# From this width on, AI-OS scales embeddings like upstream.
_AIOS_SCALED_FROM = 512
_AIOS_EXPERTS_PER_TOKEN = 2
# Values that no tensor shape reveals, with the setting that provides them if no file does.
_STATED_ONLY = {"num_heads": "--num-heads", "H_cycles": "--h-cycles", "L_cycles": "--l-cycles"}
# The same for values that only some checkpoints need.
_STATED_OR_GIVEN = {"seq_len": "--max-seq-len", "dialect": "--hrm-dialect upstream or aios"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HrmConfig:
    """The two dialects use the same tensor names but compute differently.

    upstream   embeddings times √hidden; z_L carries over from one H cycle to the next
    aios       embeddings times √hidden from 512 on, clamped to ±10; z_L restarts each H cycle; logits clamped to ±20
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    h_cycles: int
    l_cycles: int
    h_layers: int
    l_layers: int
    inner_size: int
    """Width of the gated MLP, or of each expert."""
    positions: Positions
    seq_len: int
    """The longest sequence to serve, in tokens, without the puzzle's positions."""
    position_rows: int
    """Rows of the learned position table, including the puzzle's positions; 0 with rotary positions."""
    rms_norm_eps: float
    rope_theta: float
    halt_max_steps: int
    num_experts: int
    """0 for a dense model."""
    experts_per_token: int
    dialect: Dialect
    puzzle_size: int
    """Size of a puzzle's embedding; 0 if the model has none."""
    num_puzzles: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.h_layers + self.l_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            max_seq_len=self.seq_len,
        )

    @property
    def puzzle_len(self) -> int:
        """Number of positions before the first token that hold the puzzle's embedding."""
        return -(-self.puzzle_size // self.hidden_size)

    @property
    def decoding_steps(self) -> int:
        """Outer steps per token in the dialect's own decoding."""
        return 1 if self.dialect == "aios" else self.halt_max_steps

    @property
    def embedding_scale(self) -> float:
        if self.dialect == "aios" and self.hidden_size < _AIOS_SCALED_FROM:
            return 1.0
        scale: float = float(self.hidden_size) ** 0.5
        return scale

    @staticmethod
    def read(
        config: Mapping[str, object], *, dialect: Dialect | None = None, max_seq_len: int | None = None
    ) -> "HrmConfig":
        """From a checkpoint's config; `dialect` overrides the one it states.

        `max_seq_len` is the context length to serve. It is required only if the checkpoint does not state its own, as
        with upstream's rotary positions.
        """
        _check_stated(config, dialect, max_seq_len)
        reader = ConfigReader(config, source=str(config.get(SETTINGS_FILES) or "The HRM config"))
        hidden, heads = reader.integer("hidden_size", most=MOST_HIDDEN), reader.integer("num_heads", most=MOST_HEADS)
        positions = reader.text("pos_encodings")
        if positions not in _POSITIONS:
            raise UnsupportedModel(f"HRM with pos_encodings {positions!r} is not supported; rope and learned are.")
        if hidden % heads or (positions == "rope" and hidden // heads % 2):
            raise BadCheckpoint(
                f"{reader.source}: 'hidden_size' {hidden} does not divide into {heads} heads ('num_heads')"
                + (" of an even width each." if positions == "rope" else ".")
            )
        chosen = _dialect(reader, dialect)
        aios = chosen == "aios"
        experts = reader.optional_integer("num_experts") or 0
        per_token = reader.integer("num_experts_per_tok", _AIOS_EXPERTS_PER_TOKEN if aios else None) if experts else 0
        if per_token > experts:
            raise BadCheckpoint(
                f"{reader.source}: 'num_experts_per_tok' is {per_token}, but there are only {experts} experts."
            )
        puzzle_size = reader.optional_integer("puzzle_emb_ndim") or 0
        learned = reader.integer("seq_len") - -puzzle_size // hidden if positions == "learned" else 0
        return HrmConfig(
            vocab_size=reader.integer("vocab_size", most=MOST_VOCAB),
            hidden_size=hidden,
            num_heads=heads,
            h_cycles=reader.integer("H_cycles", most=MOST_CYCLES),
            l_cycles=reader.integer("L_cycles", most=MOST_CYCLES),
            h_layers=reader.integer("H_layers", most=MOST_LAYERS),
            l_layers=reader.integer("L_layers", most=MOST_LAYERS),
            inner_size=reader.integer("intermediate_size", most=MOST_INNER),
            positions=positions,
            seq_len=_seq_len(reader, max_seq_len),
            position_rows=learned,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-5, least=EPS[0], most=EPS[1]),
            rope_theta=reader.number("rope_theta", 10000.0, least=THETA[0], most=THETA[1]),
            halt_max_steps=reader.integer("halt_max_steps", 1 if aios else None),
            num_experts=experts,
            experts_per_token=per_token,
            dialect=chosen,
            puzzle_size=puzzle_size,
            num_puzzles=reader.integer("num_puzzle_identifiers") if puzzle_size else 0,
        )


def _check_stated(config: Mapping[str, object], dialect: Dialect | None, max_seq_len: int | None) -> None:
    """Names everything that is missing at once. A dialect or a length that is missing alone has errors of its own."""
    if all(config.get(key) is not None for key in _STATED_ONLY):
        return
    given = {**config, **{key: value for key, value in (("dialect", dialect), ("seq_len", max_seq_len)) if value}}
    missing = {key: flag for key, flag in (_STATED_ONLY | _STATED_OR_GIVEN).items() if given.get(key) is None}
    keys, flags = " and ".join(map(repr, missing)), " and ".join(missing.values())
    files = config.get(SETTINGS_FILES)
    if files is None:
        raise BadCheckpoint(
            f"There is no brain.json, checkpoint_metadata.json or all_config.yaml with these weights, and the tensors "
            f"do not reveal {keys}. Give such a file with --hrm-config, or {flags}."
        )
    are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
    raise BadCheckpoint(
        f"{keys} {are} not in {files}, and the tensors do not reveal {them}. Add {them} there, or give {flags}."
    )


def _dialect(reader: ConfigReader, given: str | None) -> Dialect:
    name = given if given is not None else reader.get("dialect")
    if name is None:
        raise UnsupportedModel(
            "This HRM checkpoint does not name its dialect, which determines what it computes. "
            "Give --hrm-dialect upstream or --hrm-dialect aios."
        )
    if name not in DIALECTS:
        raise UnsupportedModel(f"HRM dialect {name!r} is not known; known are {' and '.join(DIALECTS)}.")
    return name


def _seq_len(reader: ConfigReader, max_seq_len: int | None) -> int:
    own = reader.optional_integer("seq_len")
    if own is None and max_seq_len is None:
        raise BadCheckpoint(f"{reader.source} has no context length ('seq_len'). Give --max-seq-len.")
    if own is not None and max_seq_len is not None and max_seq_len > own:
        raise BadRequest(
            f"max_seq_len is {max_seq_len}, but the model knows only {own} positions; lower it to {own} or less.",
            param="max_seq_len",
        )
    return max_seq_len or own or 0
