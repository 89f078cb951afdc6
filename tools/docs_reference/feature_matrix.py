"""Which features go together, and on which backends: each cell is what the code says when it is asked.

A question is a tiny model and settings. It is opened and planned as for loading, so a backend is chosen for it, which
checks the settings; structured outputs are asked of the rules that admit requests. Loads nothing.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from docs_reference.markup import table
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.engine.admission import AdmissionRules
from ostro.engine.constraint import Constraint
from ostro.engine.request import Request
from ostro.errors import BadRequest, Unsupported, UnsupportedModel
from ostro.models.description import Description
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.weights.described import DescribedCheckpoint, Formats

Settings = Mapping[str, object]
_GIB = 1 << 30
# What a device that is not here has.
_MEMORY = 64 * _GIB
_DECODER: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MIXTURE: Mapping[str, object] = {
    **_DECODER,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_ENCODER: Mapping[str, object] = {
    **_DECODER,
    "architectures": ["BertModel"],
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"
_RANK = 4


@dataclass(frozen=True, eq=False)
class Target:
    """A device with a backend."""

    letter: str
    title: str
    settings: Settings
    is_native: bool = False
    """Whether a model that another backend would run there does not count."""


@dataclass(frozen=True, eq=False)
class Feature:
    title: str
    settings: Settings = field(default_factory=dict)
    by_letter: Mapping[str, Settings] = field(default_factory=dict)
    """Settings that differ by target."""
    config: Settings | None = None
    """A model that is not plain."""
    formats: Formats | None = None
    has_adapter: bool = False
    is_structured: bool = False


TARGETS = (
    Target("N", "CPU, native core", {"device": "cpu"}, is_native=True),
    Target("T", "CPU, torch", {"device": "cpu", "backend": "torch"}),
    Target("G", "NVIDIA GPU", {"device": "cuda"}),
    Target("J", "TPU, JAX", {"device": "tpu"}),
    Target("M", "Mac's GPU", {"device": "mps"}),
)
_Q4 = Formats(matrices="Q4_0", embedding="Q8_0", vectors="F32", in_one_file=True)
FEATURES = (
    Feature("LoRA adapters", has_adapter=True),
    Feature("drafts", {"speculative": "ngram"}),
    Feature("schemas and tools", is_structured=True),
    Feature("prefixes on disk", {"kv_disk": "/var/cache/ostro"}),
    Feature("prefixes in host memory", {"kv_host_memory": _GIB}),
    Feature("tensor parallel", {"tensor_parallel": 2}),
    Feature("weights in int8", {"quantize": "int8"}),
    Feature("weights in fp8", {"quantize": "fp8"}),
    Feature("8-bit KV cache", {"kv_dtype": "fp8"}, {"N": {"kv_dtype": "int8"}, "T": {"kv_dtype": "int8"}}),
    Feature("deterministic", {"deterministic": True}),
    Feature("quantised checkpoint", formats=_Q4),
    Feature("mixture of experts", config=_MIXTURE),
    Feature("its experts on the CPU", {"cpu_experts": "all"}, config=_MIXTURE),
    Feature("encoder", config=_ENCODER),
)


@cache
def answer(target: Target, *features: Feature) -> str | None:
    """Why these features do not go together there, in the words of the code; None if they do."""
    with _adapter() as adapter:
        try:
            _ask(target, features, adapter)
        except (BadRequest, UnsupportedModel) as error:
            return error.message.replace(str(adapter), "ADAPTER")
    return None


def go_together(one: Feature, other: Feature) -> bool:
    """Whether both can be asked for at once: there is one model, and each setting has one value."""
    return (one.config is None or other.config is None) and not one.settings.keys() & other.settings.keys()


def _ask(target: Target, features: tuple[Feature, ...], adapter: Path) -> None:
    settings: dict[str, Any] = dict(target.settings)
    for feature in features:
        settings |= feature.by_letter.get(target.letter, feature.settings)
        if feature.has_adapter:
            settings["adapters"] = (("a", str(adapter)),)
    config = next((each.config for each in features if each.config is not None), _DECODER)
    formats = next((each.formats for each in features if each.formats is not None), None)
    checkpoint = DescribedCheckpoint.of("model", config, formats)
    found = plan(checkpoint, EngineConfig(**settings), memory=_MEMORY)
    if target.is_native and found.not_native is not None:
        raise Unsupported(f"torch runs it instead: {found.not_native}.")
    if any(each.is_structured for each in features):
        _admit(describe(config))


def _admit(described: Description) -> None:
    generates = not isinstance(described, Encoder)
    rules = AdmissionRules(max_len=512, vocab_size=512, generates=generates, constrains=True)
    constraint = Constraint(grammar='start: "a"')
    rules.check(Request(id=0, prompt_ids=(1,), params=SamplingParams(), seed=0, constraint=constraint))


@contextmanager
def _adapter() -> Iterator[Path]:
    """A LoRA adapter of one projection."""
    with TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": _RANK}))
        halves = {"lora_A": (_RANK, 256), "lora_B": (256, _RANK)}
        tensors = {f"{_ADAPTED}.{half}.weight": np.zeros(shape, np.float32) for half, shape in halves.items()}
        save_file(tensors, directory / "adapter_model.safetensors")
        yield directory


class _Reasons:
    """Numbers for the sentences under a table."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, sentence: str) -> int:
        return self._numbers.setdefault(sentence, len(self._numbers) + 1)

    def listed(self) -> str:
        return "".join(f"{number}. {sentence}\n" for sentence, number in self._numbers.items())


def parts() -> dict[str, str]:
    return {"features-by-backend": by_backend(), "features-together": together(), "feature-letters": letters()}


def letters() -> str:
    return "; ".join(f"**{target.letter}** {target.title}" for target in TARGETS)


def by_backend() -> str:
    reasons = _Reasons()

    def cell(target: Target, feature: Feature) -> str:
        reason = answer(target, feature)
        return "yes" if reason is None else f"no ({reasons.number(reason)})"

    rows = [(feature.title, *(cell(target, feature) for target in TARGETS)) for feature in FEATURES]
    return f"{table(('', *(target.title for target in TARGETS)), rows)}\n{reasons.listed()}"


def together() -> str:
    """Where each pair goes together, of the places where each of the two is there."""
    reasons = _Reasons()
    rows = []
    for row, one in enumerate(FEATURES[:-1]):
        cells = ["" if column <= row else _pair(one, other, reasons) for column, other in enumerate(FEATURES[1:], 1)]
        rows.append((one.title, *cells))
    return f"{table(('', *(each.title for each in FEATURES[1:])), rows)}\n{reasons.listed()}"


def _pair(one: Feature, other: Feature, reasons: _Reasons) -> str:
    if not go_together(one, other):
        return "–"
    # Some features are for others alone.
    able = [
        target
        for target in TARGETS
        if answer(target, one, other) is None or (answer(target, one) is None and answer(target, other) is None)
    ]
    if not able:
        return "nowhere"
    refused = {target: reason for target in able if (reason := answer(target, one, other)) is not None}
    letters = "".join(target.letter for target in able if target not in refused)
    numbers = ", ".join(map(str, sorted({reasons.number(reason) for reason in refused.values()})))
    return " ".join(filter(None, (letters or "no", f"({numbers})" if numbers else "")))


def pairs() -> Iterator[tuple[Feature, Feature]]:
    return ((one, other) for one, other in combinations(FEATURES, 2) if go_together(one, other))
