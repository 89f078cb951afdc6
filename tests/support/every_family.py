"""Every family's test case. `tests/families` is read: a file there is all that a family's tests need."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from runpy import run_path

import pytest
from _pytest.mark import ParameterSet
from family_case import SIZES, Config, FamilyCase

from ostro.backends.native.support import NotNative, native_architecture
from ostro.models.family import Family
from ostro.models.registry import ENCODERS, FAMILIES, describe

_FAMILIES = {family.model_type: family for family in (*FAMILIES, *ENCODERS)}
_FILES = sorted((Path(__file__).parents[1] / "families").glob("*.py"))
_EVERY: Mapping[str, FamilyCase] = {path.stem: run_path(str(path))["CASE"] for path in _FILES}

CASES = {name: case for name, case in _EVERY.items() if _FAMILIES[case.model_type] in FAMILIES}
"""Families that generate, by the name of their file."""
ENCODER_CASES = {name: case for name, case in _EVERY.items() if name not in CASES}
MIXTURES = tuple(name for name, case in CASES.items() if case.mixture)
TORCH_ONLY = tuple(name for name, case in CASES.items() if case.torch_only)
RECURRENT = tuple(name for name, case in CASES.items() if case.recurrent)
RUN_BY_ALL = tuple(name for name, case in CASES.items() if not case.torch_only and not case.recurrent)
"""Families that the native core and fused kernels run."""
NATIVE = (*RUN_BY_ALL, *(name for name in RECURRENT if name not in TORCH_ONLY))
DENSE = tuple(name for name in RUN_BY_ALL if name not in MIXTURES)
"""Families that are divided over devices, and that JAX runs."""
DENSE_RECURRENT = tuple(name for name in RECURRENT if name not in MIXTURES and name not in TORCH_ONLY)


def family_of_case(name: str) -> Family:
    return _FAMILIES[_EVERY[name].model_type]


def config_of(name: str, sizes: Config, variant: str = "", **changes: object) -> Config:
    """A config.json of a family, with sizes named as in `SIZES`."""
    named = {"architectures": [family_of_case(name).architecture]}
    return {**CASES[name].sized(sizes, variant), **named, **changes}


def configs_of(names: tuple[str, ...], sizes: Config) -> Mapping[str, Config]:
    """One config for each family and variant, as "olmo3" and "olmo3-yarn"."""
    return {
        f"{name}-{variant}" if variant else name: config_of(name, sizes, variant)
        for name in names
        for variant in ("", *CASES[name].variants)
    }


def native_configs(sizes: Config) -> Mapping[str, Config]:
    """Configs that the native core runs: each family, and the variants that it does not refuse."""
    return {
        name: config
        for name, config in configs_of(tuple(CASES), sizes).items()
        if name in NATIVE or why_not_native(config) is None
    }


def why_not_native(config: Config) -> str | None:
    try:
        native_architecture(describe(config), 4)
    except NotNative as reason:
        return str(reason)
    return None


def with_variants_in_full(names: Iterable[str]) -> list[ParameterSet]:
    """For `parametrize`: each family for `make test`, its variants for `make test-all`."""
    return [pytest.param(name, marks=() if name in CASES else pytest.mark.full) for name in names]


def some(names: Iterable[str], *chosen: str) -> list[ParameterSet]:
    """For `parametrize`: those chosen for `make test`, the others for `make test-all`."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.full) for name in names]


TINY: Mapping[str, Config] = {name: config_of(name, SIZES) for name in CASES}
"""One tiny config per family."""

EIGHT_HEADS: Config = {
    **SIZES,
    "num_attention_heads": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 4,
    "vocab_size": 300,
}
DIVISIBLE: Mapping[str, Config] = {name: config_of(name, EIGHT_HEADS) for name in DENSE}
"""Configs that can be divided by eight; keys and values have two heads where they may have fewer than queries."""


FALCON_FORMS = ("", "norm-before-gate", "norm-after-gate", "biases")


def _with_states(name: str, variant: str = "", **changes: object) -> Config:
    return config_of(name, EIGHT_HEADS, variant, **changes)


DIVISIBLE_STATES: Mapping[str, Config] = {
    "qwen3_5": _with_states("qwen3_5", linear_num_key_heads=4, linear_num_value_heads=12),
    "qwen3_5-tied": _with_states("qwen3_5", "tied", linear_num_key_heads=4, linear_num_value_heads=4),
    # Without experts, which are not divided.
    "qwen3_next": _with_states("qwen3_next", linear_num_key_heads=4, mlp_only_layers=[0, 1], linear_num_value_heads=12),
    "lfm2": _with_states("lfm2"),
    "lfm2-biases": _with_states("lfm2", "biases"),
    # A group that all ranks share, then groups that are normed as one row.
    "granitemoehybrid": _with_states("granitemoehybrid", "dense-rotating"),
    "granitemoehybrid-groups": _with_states("granitemoehybrid", "groups"),
    "nemotron_h": _with_states("nemotron_h", "dense", mamba_num_heads=8),
    **{f"falcon_h1-{each}" if each else "falcon_h1": _with_states("falcon_h1", each) for each in FALCON_FORMS},
}
"""The same for layers that keep a state; they can be divided by four."""
