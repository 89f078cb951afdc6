"""Templates: what they render, held to transformers, and what the sandbox keeps from them."""

from collections.abc import Sequence

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ostro.errors import BadRequest, Unsupported
from ostro.text.builtin_templates import BUILTIN_TEMPLATES
from ostro.text.chat import ChatTemplate, Message
from ostro.text.jinja_template import JinjaTemplate

CONVERSATION: list[Message] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Is 3 < 4?\n"},
    {"role": "assistant", "content": "Yes. "},
    {"role": "user", "content": "Ünïcode & <b>html</b>"},
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, messages: Sequence[Message] = CONVERSATION) -> str:
    return JinjaTemplate(ChatTemplate(source, VARIABLES)).render(messages)


# What real templates use: white space control, namespaces, macros, loop controls, filters, string methods, JSON.
FEATURES = [
    "{{ bos_token }}{% for m in messages %}\n {% if m.role == 'user' %}\n {{ m.content }}\n {% endif %}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% macro show(m, i=0) %}[{{ i }} {{ m['content'] | trim }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.index0) }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{% for m in messages[::-1] %}{{ m.content.split('<')[-1] ~ loop.last ~ '|' ~ 2 * 3 ** 2 }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('/') }}{{ missing }}",
    "{% set all %}{% for m in messages %}{{ m.role }} {% endfor %}{% endset %}{{ all | upper }}{{ [1] * 2 + [2] }}",
    "{% if add_generation_prompt %}{{ 'go' }}{% endif %}{% if tools is none %}no tools{% endif %}{{ eos_token + '' }}",
    "{{ dict(a=1).items() | list }}{{ 'x{}'.format(1) }}{{ strftime_now('%Y') | length }}",
]


@pytest.mark.parametrize("source", [*FEATURES, *(builtin.source for builtin in BUILTIN_TEMPLATES.values())])
def test_rendering_is_that_of_transformers(source: str) -> None:
    texts, _ = render_jinja_template([CONVERSATION], chat_template=source, add_generation_prompt=True, **VARIABLES)
    assert rendered(source) == texts[0]


def test_built_in_formats_are_those_the_families_were_trained_on() -> None:
    messages: list[Message] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = {
        "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n",
        "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "mistral": "<s>[INST] S\n\nU[/INST]",
        "generic": "<s>System: S\n\nUser: U\n\nAssistant:",
    }
    assert {name: rendered(builtin.source, messages) for name, builtin in BUILTIN_TEMPLATES.items()} == expected


def test_mistrals_system_text_goes_before_the_last_users_and_answers_are_ended() -> None:
    assert rendered(BUILTIN_TEMPLATES["mistral"].source) == (
        "<s>[INST] Is 3 < 4?\n[/INST] Yes.</s>[INST]  Be brief. \n\nÜnïcode & <b>html</b>[/INST]"
    )


def test_text_parts_are_one_text_to_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_part_that_is_not_text_is_refused_by_its_type() -> None:
    with pytest.raises(Unsupported, match="image_url"):
        rendered("", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_found_under_either_name(name: str) -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert rendered(source, [{"role": "assistant", "content": "", name: "hm"}]) == "hmhm"


@pytest.mark.parametrize("role", [None, "", "user<|im_end|>", 7])
def test_message_needs_a_plain_role(role: object) -> None:
    with pytest.raises(BadRequest, match="role"):
        rendered("", [{"role": role, "content": ""}])


def test_refusal_of_the_template_reaches_the_caller_in_its_words() -> None:
    with pytest.raises(BadRequest, match="refused the messages: roles must alternate"):
        rendered("{{ raise_exception('roles must\nalternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% include 'file' %}",
    ],
)
def test_failing_or_forbidden_template_is_a_short_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template failed") as caught:
        rendered(source)
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message
