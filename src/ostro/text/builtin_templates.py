"""Templates for models that ship none, and the rule that picks one: the operator's choice, then the model's own, then
the format whose special tokens the model has.

A format only works for a model whose vocabulary has its markers, so that is checked; `generic` needs none, and is never
picked automatically.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostro.errors import BadRequest
from ostro.text.chat import ChatTemplate

_log = logging.getLogger(__name__)


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

# As in Mistral's own tokenizers since their third version: the system's text goes before the last user's.
_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(preface='', last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}
{%- set ns.preface = ns.preface ~ (message.content or '') ~ '\n\n' -%}
{%- elif message.role != 'assistant' -%}
{%- set ns.last_user = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ ' ' ~ (message.content or '') | trim ~ '</s>' }}
{%- elif message.role not in ('system', 'developer') -%}
{{ '[INST] ' ~ (ns.preface if loop.index0 == ns.last_user else '') ~ (message.content or '') ~ '[/INST]' }}
{%- endif -%}
{%- endfor -%}
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
    "mistral": BuiltinTemplate(_MISTRAL, ("[INST]", "[/INST]", "</s>")),
    "generic": BuiltinTemplate(_GENERIC),
}

CHOICES = f"{', '.join(BUILTIN_TEMPLATES)} or the path of a .jinja file"


@dataclass(frozen=True, slots=True)
class Choice:
    template: ChatTemplate | None
    turn_end: str | None = None
    """The token that ends a turn in a built-in format."""


def choose_template(
    choice: str | None,
    own: str | None,
    variables: Mapping[str, str],
    has_token: Callable[[str], bool],
    own_for_tools: str | None = None,
) -> Choice:
    """The operator's choice, a built-in's name or a file; else the model's own template; else the built-in that the
    model's tokens identify; else none. `has_token` tells whether the vocabulary has a token.
    """
    if choice is None and own is not None:
        return Choice(ChatTemplate(own, variables, own_for_tools))
    if choice is None:
        return _identified(variables, has_token)
    if choice.endswith(".jinja"):
        return Choice(ChatTemplate(_read(Path(choice)), variables))
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
    return Choice(ChatTemplate(builtin.source, variables), builtin.turn_end)


def _identified(variables: Mapping[str, str], has_token: Callable[[str], bool]) -> Choice:
    """The built-in whose markers the model has; of several, one whose turn end is the model's eos token."""
    found = {
        name: builtin
        for name, builtin in BUILTIN_TEMPLATES.items()
        if builtin.markers and all(map(has_token, builtin.markers))
    }
    if not found:
        return Choice(None)
    ending = [name for name, builtin in found.items() if builtin.turn_end == variables.get("eos_token")]
    name = (ending or list(found))[0]
    _log.info(
        "The model has no chat template; its special tokens are those of %s, whose format is used. Set chat_template "
        "for another.",
        name,
    )
    return Choice(ChatTemplate(found[name].source, variables), found[name].turn_end)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(
            f"Cannot read the chat template {path.name}: {error}. Set chat_template to {CHOICES}.",
            param="chat_template",
        ) from error
