"""A model's chat template and a conversation's messages, as data. Knows no Jinja: templates run in `render_process`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`variables` are what the template may ask of the tokenizer: `bos_token`, `eos_token` and others."""

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
