"""What LoRA adapters take beside their model, by their headers."""

import re
from collections.abc import Sequence
from pathlib import Path

from ostro.config import EngineConfig
from ostro.sources.files import ADAPTER_WEIGHTS
from ostro.weights.stored import TensorHeader, safetensors_headers

_LORA_B = re.compile(r"base_model\.model\.(?P<parent>.+)\.(?P<part>\w+)\.lora_B(?:\.default)?\.weight")
# Projections that models compute as one, wherever files hold them apart.
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


def adapter_values(config: EngineConfig, base: Sequence[TensorHeader]) -> int:
    """Numbers of all adapters as they are kept: where projections are one matrix, each B is as tall as that."""
    return sum(_values(Path(path).expanduser() / ADAPTER_WEIGHTS, base) for _, path in config.adapters)


def _values(path: Path, base: Sequence[TensorHeader]) -> int:
    rows = {tensor.name.removesuffix(".weight"): tensor.shape[0] for tensor in base}
    values = 0
    for tensor in safetensors_headers(path):
        match = _LORA_B.fullmatch(tensor.name)
        if match is None:
            values += tensor.values
            continue
        parts = next((fused for fused in _FUSED if match["part"] in fused), {match["part"]})
        # An adapter of the layers alone leaves out what they are in.
        places = ({f"{prefix}{match['parent']}.{part}" for part in parts} for prefix in ("", "model."))
        height = max(sum(rows.get(name, 0) for name in names) for names in places)
        values += max(height, tensor.shape[0]) * tensor.shape[1]
    return values
