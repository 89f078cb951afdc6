"""Mamba-2 mixers, for the families that have them: sizes under the keys of most configs, parts under the names of all
checkpoints.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as shown

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Convolution, Mamba2
from ostro.models.config import MOST_HEAD_DIM, MOST_HEADS, MOST_TAPS, ConfigReader
from ostro.models.families import gguf_names as gguf
from ostro.models.families.common import HubLayer

_NO_LIMITS = ([0, math.inf], (0, math.inf), [0, {"__float__": "Infinity"}])
"""As transformers writes them, today last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int

    @classmethod
    def read(cls, config: ConfigReader, width: int, width_named: str) -> "MambaSizes":
        """Sizes of a config with `mamba_n_heads` and the like; `width_named` says in errors where the width is from."""
        heads = config.integer("mamba_n_heads", most=MOST_HEADS)
        if width % heads:
            raise config.bad("mamba_n_heads", heads, f"a divisor of {width_named} ({width})")
        if config.get("mamba_d_head") not in (None, "auto"):
            head_dim = config.integer("mamba_d_head", most=MOST_HEAD_DIM)
            if heads * head_dim != width:
                raise config.bad("mamba_d_head", head_dim, f'{width // heads}, or "auto"')
        if width // heads > MOST_HEAD_DIM:
            raise config.bad(
                "mamba_n_heads", heads, f"at least {-(-width // MOST_HEAD_DIM)} for {width_named} ({width})"
            )
        groups = config.integer("mamba_n_groups", most=MOST_HEADS)
        if heads % groups:
            raise config.bad("mamba_n_groups", groups, f"a divisor of 'mamba_n_heads' ({heads})")
        return cls(
            heads=heads,
            head_dim=width // heads,
            state_size=config.integer("mamba_d_state", most=MOST_HEAD_DIM),
            groups=groups,
            taps=config.integer("mamba_d_conv", most=MOST_TAPS),
        )

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.groups * self.state_size

    @property
    def input_rows(self) -> tuple[int, ...]:
        """How many rows of the input projection are for z, u, B, C and t, in this order."""
        groups = self.groups * self.state_size
        return self.width, self.width, groups, groups, self.heads

    def mixer(self, layer: HubLayer, parent: str, *, bias: bool, output_bias: bool, conv_bias: bool) -> Mamba2:
        """A mixer with gates before its norm, which is of whole rows."""
        hidden, width = layer.shape.hidden_size, self.width
        return Mamba2(
            heads=self.heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            groups=self.groups,
            inputs=layer.projection(parent, hidden, {"in_proj": sum(self.input_rows)}, bias=bias),
            conv=Convolution(layer.named(f"{parent}.conv1d"), self.mixed, self.taps, conv_bias),
            decay=layer.named(f"{parent}.A_log"),
            step_bias=layer.named(f"{parent}.dt_bias"),
            skip=layer.named(f"{parent}.D"),
            norm=layer.norm(f"{parent}.norm", width),
            output=layer.projection(parent, width, {"out_proj": hidden}, bias=output_bias),
        )


def check_mamba(config: ConfigReader, *, activation_key: str = "hidden_act") -> None:
    """Raises UnsupportedModel for variants that Ostro does not compute."""
    if config.text(activation_key, "silu") != "silu":
        raise UnsupportedModel(f"{config.source}: {activation_key!r} of a model with Mamba-2 layers must be silu.")
    if (limit := config.get("time_step_limit")) is not None and limit not in _NO_LIMITS:
        raise UnsupportedModel(f"{config.source}: 'time_step_limit' is {shown(limit)}, which Ostro does not support.")


GGUF_RESHAPE: Mapping[str, Callable[[gguf.Shape], gguf.Shape]] = {
    "ssm_a": gguf.flat,
    "ssm_d": gguf.flat,
    "ssm_norm": gguf.flat,
    "ssm_conv1d": gguf.filters,
}
GGUF_NEGATED_EXP = frozenset({"ssm_a"})


def gguf_blocks(parent: str) -> Mapping[str, str]:
    """A mixer's tensors in GGUF and in ours, without endings."""
    return {
        "ssm_in": f"{parent}.in_proj",
        "ssm_conv1d": f"{parent}.conv1d",
        "ssm_norm": f"{parent}.norm",
        "ssm_out": f"{parent}.out_proj",
    }


def gguf_whole(parent: str) -> Mapping[str, str]:
    """Those whose names have no endings."""
    return {"ssm_a": f"{parent}.A_log", "ssm_d": f"{parent}.D", "ssm_dt.bias": f"{parent}.dt_bias"}
