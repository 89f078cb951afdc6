"""The size of LoRA adapters, from their headers."""

import re
from collections.abc import Sequence
from pathlib import Path

from ostro.config import EngineConfig
from ostro.sources.files import ADAPTER_WEIGHTS
from ostro.weights.stored import TensorHeader, safetensors_headers

_LORA_A = re.compile(r"base_model\.model\.(?P<target>.+)\.lora_A(?:\.default)?\.weight")
_LORA_B = re.compile(r"base_model\.model\.(?P<parent>.+)\.(?P<part>\w+)\.lora_B(?:\.default)?\.weight")
# Projections that models fuse, even if files store them separately.
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


def adapter_values(config: EngineConfig, base: Sequence[TensorHeader]) -> int:
    """Number of values of all adapters in memory: with fused projections, each B has the fused matrix's height."""
    return sum(_values(Path(path).expanduser() / ADAPTER_WEIGHTS, base) for _, path in config.adapters)


def adapter_ranks(config: EngineConfig, backbone: str) -> dict[str, dict[str, int]]:
    """The ranks of all adapters, by the projections that they change, which they may name without the backbone."""
    ranks: dict[str, dict[str, int]] = {}
    for adapter, path in config.adapters:
        own = ranks.setdefault(adapter, {})
        for tensor in safetensors_headers(Path(path).expanduser() / ADAPTER_WEIGHTS):
            if match := _LORA_A.fullmatch(tensor.name):
                own |= dict.fromkeys((match["target"], f"{backbone}.{match['target']}"), tensor.shape[0])
    return ranks


def _values(path: Path, base: Sequence[TensorHeader]) -> int:
    rows = {tensor.name.removesuffix(".weight"): tensor.shape[0] for tensor in base}
    values = 0
    for tensor in safetensors_headers(path):
        match = _LORA_B.fullmatch(tensor.name)
        if match is None:
            values += tensor.values
            continue
        parts = next((fused for fused in _FUSED if match["part"] in fused), {match["part"]})
        # An adapter saved from the bare backbone omits its prefix.
        places = ({f"{prefix}{match['parent']}.{part}" for part in parts} for prefix in ("", "model."))
        height = max(sum(rows.get(name, 0) for name in names) for names in places)
        values += max(height, tensor.shape[0]) * tensor.shape[1]
    return values
