"""A model's rope settings, as config.json spells them. Imports no torch: planning reads them too.

They come as `rope_theta` and `rope_scaling`, or as one `rope_parameters` table; Gemma 3 has one table for its windowed
layers and one for the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ostro.models.config import ConfigReader


@dataclass(frozen=True, slots=True)
class RopeSettings:
    table: ConfigReader
    """`rope_theta`, `partial_rotary_factor`, `rope_type`, and what that type of scaling needs."""
    max_positions: int
    """The context that config.json declares."""
    original_positions: int
    """The context before it was stretched, for scalings that tell."""

    @property
    def kind(self) -> str:
        if self.table.get("long_factor") is not None:
            return "longrope"  # Early files call it "su" or "yarn".
        return self.table.text("rope_type", self.table.text("type", "default"))

    @property
    def theta(self) -> float:
        return self.table.number("rope_theta", 10000.0)

    def rotary_dim(self, head_dim: int) -> int:
        """The leading dimensions of a head that rotate; the rest pass through."""
        return int(head_dim * self.table.number("partial_rotary_factor", 1.0))

    def default_context(self) -> int:
        # Beyond its original context longrope takes other factors, for short prompts too: only on request.
        return min(self.original_positions, self.max_positions) if self.kind == "longrope" else self.max_positions

    def longest_context(self) -> int:
        if self.kind != "yarn":
            return self.max_positions
        # Yarn is switched on by adding its table, and max_position_embeddings is often left as it was.
        return max(self.max_positions, int(self.original_positions * self.table.number("factor", 1.0)))


def rope_settings(config: ConfigReader, table: Mapping[str, object] | None = None) -> RopeSettings:
    """Rope of the model, or of the layers that `table` is for where a model has several."""
    if table is None:
        outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        table = {**outer, **(config.table("rope_scaling") or config.table("rope_parameters") or {})}
    reader = ConfigReader(table)
    max_positions = config.integer("max_position_embeddings")
    original = "original_max_position_embeddings"
    return RopeSettings(reader, max_positions, config.integer(original, reader.integer(original, max_positions)))


def full_and_sliding_ropes(config: ConfigReader) -> tuple[RopeSettings, RopeSettings]:
    """Gemma 3's: the rope of layers with full attention, and that of layers with a window."""
    by_type = ConfigReader(config.table("rope_parameters") or {})
    full = {
        "rope_theta": config.number("rope_theta", 1e6),
        **(by_type.table("full_attention") or config.table("rope_scaling") or {}),
    }
    sliding = {
        "rope_theta": config.number("rope_local_base_freq", 1e4),
        **(by_type.table("sliding_attention") or {}),
    }
    return rope_settings(config, full), rope_settings(config, sliding)
