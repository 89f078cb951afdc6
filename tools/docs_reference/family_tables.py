"""The models that Ostro serves, from the registry of families."""

from docs_reference.markup import code, table
from ostro.models.registry import ENCODERS, FAMILIES


def parts() -> dict[str, str]:
    rows = [
        (
            family.title,
            code(family.architecture),
            "" if family.gguf is None else ", ".join(map(code, family.gguf.architectures)),
        )
        for family in sorted(FAMILIES, key=lambda family: family.title.lower())
    ]
    encoders = [(family.title, code(family.bare), code(family.architecture)) for family in ENCODERS]
    return {
        "families": table(("models", "architecture", "in GGUF files"), rows),
        "encoders": table(("encoders", "to embed", "to rank"), encoders),
    }
