"""What tests and pages say of families is what the registry and the readers of descriptions say."""

import re

import family_case
import pytest
from doc_pages import ROOT
from every_family import (
    CASES,
    ENCODER_CASES,
    TINY,
    TORCH_ONLY,
    config_of,
    family_of_case,
    why_not_native,
)

from ostro.backends.cuda.fusible import why_unfused
from ostro.models.architecture import Architecture, HrmText
from ostro.models.registry import ENCODERS, FAMILIES, describe

SIZES = {**family_case.SIZES, "hidden_size": 64, "head_dim": 16}


def test_every_family_has_one_case() -> None:
    assert [family_of_case(name) for name in CASES] == list(FAMILIES)
    assert [family_of_case(name) for name in ENCODER_CASES] == list(ENCODERS)


@pytest.mark.parametrize("name", CASES)
def test_a_case_tells_what_its_family_is(name: str) -> None:
    described, case = describe(TINY[name]), CASES[name]
    assert (isinstance(described, Architecture) and described.has_experts) == case.mixture
    assert isinstance(described, Architecture | HrmText)
    assert bool(described.states) == case.recurrent
    assert len(described.ropes if isinstance(described, Architecture) else [described]) == case.ropes
    assert {each.settings["type"] for each in case.levanter.values()} >= {
        names.type for names in family_of_case(name).levanter
    }
    assert bool(case.gguf) == bool(family_of_case(name).gguf or name in ("mixtral", "olmo3"))


def test_the_families_that_run_natively_are_those_that_the_pages_name() -> None:
    assert {name for name in CASES if why_not_native(config_of(name, SIZES)) is not None} == set(TORCH_ONLY)
    assert {"gemma4", "gemma4_unified", "hrm_text", "llama4"} == set(TORCH_ONLY)
    page = (ROOT / "docs/cpu.md").read_text()
    assert "All families except Gemma 4, Llama 4, HRM-Text and HRM" in page


def test_the_families_with_a_layer_plan_for_fused_kernels_are_those_that_the_page_names() -> None:
    described = {name: describe(TINY[name]) for name in CASES}
    fused = {name for name, each in described.items() if isinstance(each, Architecture) and why_unfused(each) is None}
    assert described.keys() - fused == {*TORCH_ONLY, "lfm2_moe", "nemotron_h"}
    page = (ROOT / "docs/gpu.md").read_text()
    assert "All families except Gemma 4, Llama 4, HRM-Text, LFM2 MoE and Nemotron run on these" in page


def test_the_page_on_levanter_names_every_type_that_is_served() -> None:
    table = (
        (ROOT / "docs/levanter.md").read_text().split("| `type` | served as | |\n|---|---|---|\n")[1].split("\n\n")[0]
    )
    rows = [row.split("|")[1] for row in table.splitlines() if not row.endswith("refused |")]
    named = {name for row in rows for name in re.findall("`(.*?)`", row)}
    assert named == {names.type for family in FAMILIES for names in family.levanter}
