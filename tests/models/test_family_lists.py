"""What pages say of families is what the registry and the readers of descriptions say."""

import re

from doc_pages import ROOT
from tiny_configs import BY_MODEL_TYPE, TORCH_ONLY

from ostro.backends.cuda.fusible import why_unfused
from ostro.backends.native.support import NotNative, native_architecture
from ostro.models.architecture import Architecture
from ostro.models.registry import FAMILIES, describe

HEAD = {"head_dim": 16, "hidden_size": 64, "n_embd": 64, "rope_scaling": None}


def native(model_type: str) -> bool:
    try:
        native_architecture(describe({**BY_MODEL_TYPE[model_type], **HEAD}), 4)
    except NotNative:
        return False
    return True


def test_the_families_that_run_natively_are_those_that_the_pages_name() -> None:
    torch_alone = [family for family in FAMILIES if not native(family.model_type)]
    assert {family.model_type for family in torch_alone} == {"hrm_text", *TORCH_ONLY}
    page = (ROOT / "docs/cpu.md").read_text()
    assert "All families except Gemma 4, Llama 4, HRM-Text and HRM run on the native core" in page


def test_the_families_with_a_layer_plan_for_fused_kernels_are_those_that_the_page_names() -> None:
    described = {family.model_type: describe(BY_MODEL_TYPE[family.model_type]) for family in FAMILIES}
    fused = {name for name, each in described.items() if isinstance(each, Architecture) and why_unfused(each) is None}
    assert described.keys() - fused == {"hrm_text", *TORCH_ONLY}
    assert "All families except Gemma 4, Llama 4 and HRM-Text run on these" in (ROOT / "docs/gpu.md").read_text()


def test_the_page_on_levanter_names_every_type_that_is_served() -> None:
    table = (
        (ROOT / "docs/levanter.md").read_text().split("| `type` | served as | |\n|---|---|---|\n")[1].split("\n\n")[0]
    )
    rows = [row.split("|")[1] for row in table.splitlines() if not row.endswith("refused |")]
    named = {name for row in rows for name in re.findall("`(.*?)`", row)}
    assert named == {names.type for family in FAMILIES for names in family.levanter}
