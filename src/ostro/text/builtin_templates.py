"""Templates for models that bring none, and the rule that chooses. Nothing is guessed: an operator names one.

A format only works on a model whose vocabulary has its markers, so that is checked; `generic` needs none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadRequest
from ostro.text.chat import ChatTemplate


@dataclass(frozen=True, slots=True)
class BuiltinTemplate:
    source: str
    markers: tuple[str, ...] = ()
    """Tokens the vocabulary must have. The last one ends a turn."""

    @property
    def turn_end(self) -> str | None:
        return self.markers[-1] if self.markers else None


_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ (message.content or '') | trim ~ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""

# Gemma has no system turn: its text goes before the first user's.
_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(preface='') -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- set ns.preface = ns.preface ~ (message.content or '') | trim ~ '\n\n' -%}
{%- else -%}
{%- set speaker = 'model' if message.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' ~ speaker ~ '\n' ~ ns.preface ~ (message.content or '') | trim ~ '<end_of_turn>\n' }}
{%- set ns.preface = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""

_GENERIC = """\
{{- bos_token }}
{%- for message in messages -%}
{{ message.role | capitalize ~ ': ' ~ (message.content or '') | trim ~ '\n\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif -%}
"""

BUILTIN_TEMPLATES: dict[str, BuiltinTemplate] = {
    "chatml": BuiltinTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "gemma": BuiltinTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "llama3": BuiltinTemplate(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "generic": BuiltinTemplate(_GENERIC),
}

CHOICES = f"{', '.join(BUILTIN_TEMPLATES)} or the path of a .jinja file"


def choose_template(
    choice: str | None, own: str | None, variables: Mapping[str, str], has_token: Callable[[str], bool]
) -> ChatTemplate | None:
    """What the operator chose: a built-in's name or a file; else the model's own template; else none."""
    if choice is None:
        return None if own is None else ChatTemplate(own, variables)
    if choice.endswith(".jinja"):
        return ChatTemplate(_read(Path(choice)), variables)
    builtin = BUILTIN_TEMPLATES.get(choice)
    if builtin is None:
        raise BadRequest(f"Unknown chat template {choice!r}. Set chat_template to {CHOICES}.", param="chat_template")
    missing = [marker for marker in builtin.markers if not has_token(marker)]
    if missing:
        raise BadRequest(
            f"The chat template {choice!r} needs the token {missing[0]}, which this model's vocabulary lacks. "
            "Set chat_template to generic or to the path of a .jinja file.",
            param="chat_template",
        )
    return ChatTemplate(builtin.source, variables)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"Cannot read the chat template {path.name}: {error}. Set chat_template to {CHOICES}.",
            param="chat_template",
        ) from error
