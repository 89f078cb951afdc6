"""A model's rope settings in config.json, and their validation. Imports no torch.

They are stored as `rope_theta` and `rope_scaling`, or in one `rope_parameters` table; Gemma 3 and OLMo-3 have one table
for their sliding-window layers and one for the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.config import FACTOR, MOST_POSITIONS, THETA, ConfigReader

ROPE_KINDS = frozenset({"default", "dynamic", "linear", "llama3", "yarn", "longrope", "proportional"})


@dataclass(frozen=True, slots=True)
class RopeSettings:
    table: ConfigReader
    """`rope_theta`, `partial_rotary_factor`, `rope_type`, and the parameters of that type of scaling."""
    max_positions: int
    """The context length declared in config.json."""
    original_positions: int
    """The context length before it was stretched, for scalings that state it."""

    @property
    def kind(self) -> str:
        if self.table.get("long_factor") is not None:
            return "longrope"  # Early files call it "su" or "yarn".
        kind = self.table.text("rope_type", self.table.text("type", "default"))
        # Parts of a head rotate by time, height and width: for text, these are the same.
        return "default" if kind == "mrope" else kind

    @property
    def theta(self) -> float:
        return self.table.number("rope_theta", 10000.0)

    def rotary_dim(self, head_dim: int) -> int:
        """The leading dimensions of a head that rotate; the rest pass through."""
        # With proportional scaling all do, most of them by angle zero.
        return head_dim if self.kind == "proportional" else self.turning_dim(head_dim)

    def turning_dim(self, head_dim: int) -> int:
        """Dimensions of a head whose angles depend on the position."""
        return int(head_dim * self.table.number("partial_rotary_factor", 1.0))

    def default_context(self) -> int:
        # Beyond its original context, longrope uses other factors, even for short prompts, so that is opt-in.
        return min(self.original_positions, self.max_positions) if self.kind == "longrope" else self.max_positions

    def longest_context(self) -> int:
        if self.kind != "yarn":
            return self.max_positions
        # Yarn is enabled by adding its table, and max_position_embeddings often keeps its old value.
        return max(self.max_positions, int(self.original_positions * self.table.number("factor", 1.0)))


def rope_settings(config: ConfigReader, table: Mapping[str, object] | None = None) -> RopeSettings:
    """The model's rope, or, for a model with several, that of the layers described by `table`."""
    if table is None:
        outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        table = {**outer, **(config.table("rope_scaling") or config.table("rope_parameters") or {})}
    reader = ConfigReader(table)
    max_positions = config.integer("max_position_embeddings")
    original = "original_max_position_embeddings"
    return RopeSettings(reader, max_positions, config.integer(original, reader.integer(original, max_positions)))


def full_and_sliding_ropes(
    config: ConfigReader, *, theta: float, sliding_theta: float
) -> tuple[RopeSettings, RopeSettings]:
    """The rope of full-attention layers, and that of sliding-window layers, which `rope_scaling` does not affect.

    The thetas apply to configs whose `rope_parameters` have no table per layer type.
    """
    by_type = ConfigReader(config.table("rope_parameters") or {})
    full = {"rope_theta": theta, **(by_type.table("full_attention") or config.table("rope_scaling") or {})}
    sliding = {"rope_theta": sliding_theta, **(by_type.table("sliding_attention") or {})}
    return rope_settings(config, full), rope_settings(config, sliding)


def checked_rope(rope: RopeSettings, head_dim: int) -> RopeSettings:
    """Returns the settings. Raises BadCheckpoint, naming the field, or UnsupportedModel for an unknown scaling."""
    table = rope.table
    if rope.kind not in ROPE_KINDS:
        raise UnsupportedModel(f"Rope scaling {rope.kind!r} is not known; known are {', '.join(sorted(ROPE_KINDS))}.")
    table.within("rope_theta", THETA, 10000.0)
    share = table.number("partial_rotary_factor", 1.0, least=1e-3, most=1.0)
    rotated = rope.turning_dim(head_dim)
    if rotated < 2 or rotated % 2:
        raise BadCheckpoint(
            f"{table.source}: 'partial_rotary_factor' is {share} and heads are {head_dim} wide, so that {rotated} of "
            "their dimensions would rotate; they rotate in pairs, so it must be an even number above 0."
        )
    if (check := _SCALING_CHECKS.get(rope.kind)) is not None:
        check(rope, rotated)
    if rope.longest_context() > MOST_POSITIONS:
        raise table.bad("factor", table.get("factor"), f"such that the context stays below {MOST_POSITIONS}")
    return rope


def _check_linear(rope: RopeSettings, rotated: int) -> None:
    rope.table.within("factor", FACTOR)


def _check_proportional(rope: RopeSettings, rotated: int) -> None:
    rope.table.within("factor", FACTOR, 1.0)


def _check_llama3(rope: RopeSettings, rotated: int) -> None:
    rope.table.within("factor", FACTOR)
    _check_order(rope, ("low_freq_factor", None), ("high_freq_factor", None), may_be_equal=True)


def _check_yarn(rope: RopeSettings, rotated: int) -> None:
    rope.table.within("factor", FACTOR, rope.max_positions / rope.original_positions)
    _check_order(rope, ("beta_slow", 1.0), ("beta_fast", 32.0))
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.table.get(name) is not None:
            rope.table.within(name, FACTOR)


def _check_longrope(rope: RopeSettings, rotated: int) -> None:
    rope.table.within("factor", FACTOR, rope.max_positions / rope.original_positions)
    if rope.table.get("attention_factor") is not None:
        rope.table.within("attention_factor", FACTOR)
    elif rope.original_positions < 2:
        raise rope.table.bad("original_max_position_embeddings", rope.original_positions, "at least 2")
    for name in ("short_factor", "long_factor"):
        factors = rope.table.numbers(name)
        if len(factors) != rotated // 2:
            raise BadCheckpoint(
                f"{rope.table.source}: {name!r} must list {rotated // 2} numbers, got {len(factors)}: one for each "
                "pair of dimensions that rotates."
            )
        for factor in factors:
            ConfigReader({name: factor}, rope.table.source).within(name, FACTOR)


_SCALING_CHECKS: Mapping[str, Callable[[RopeSettings, int], None]] = {
    "linear": _check_linear,
    "llama3": _check_llama3,
    "longrope": _check_longrope,
    "proportional": _check_proportional,
    "yarn": _check_yarn,
}


def _check_order(
    rope: RopeSettings,
    low: tuple[str, float | None],
    high: tuple[str, float | None],
    *,
    may_be_equal: bool = False,
) -> None:
    """Names with their defaults: the first must not exceed the second, nor equal it where their difference divides."""
    least, most = (rope.table.within(name, FACTOR, default) for name, default in (low, high))
    if least > most or (least == most and not may_be_equal):
        raise rope.table.bad(low[0], least, f"{'at most' if may_be_equal else 'below'} {high[0]!r} ({most})")
