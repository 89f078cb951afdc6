"""What is found out about templates of the main families, and what is then rendered for a conversation with tools."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, get_args

import pytest
import tokenizers
from family_templates import (
    CHATML,
    DEEPSEEK_R1,
    DEEPSEEK_V31,
    GEMMA_2,
    GEMMA_4,
    GLM_4,
    GRANITE_3,
    GRANITE_4,
    HARMONY,
    LFM_2,
    LFM_25,
    LLAMA_3,
    MISTRAL,
    MISTRAL_11,
    NEMOTRON_2,
    NEMOTRON_3,
    PHI_4,
    PHI_4_FUNCTOOLS,
    PYTHONIC,
    QWEN_3,
    QWEN_3_CODER,
    QWEN_25,
    QWEN_35,
    QWEN_35_SMALL,
)
from text_vocabs import byte_level_core

from ostro.answers.plan import plan_answer
from ostro.answers.probe import TOOL_FORMATS, probed, profile_of
from ostro.answers.profile import ReasoningMarkers, TemplateProfile
from ostro.answers.tools import ReasoningSettings, Tool
from ostro.config import ToolFormat
from ostro.errors import BadRequest
from ostro.text.chat import ChatTemplate, Message, RenderOptions
from ostro.text.jinja_template import JinjaTemplate
from ostro.text.renderer import RenderLimits
from ostro.text.tokenizer import Tokenizer

THINK = ReasoningMarkers("<think>", "</think>")
CHANNEL = ReasoningMarkers("<|channel>", "<channel|>", label="thought")
_FULL = TemplateProfile(
    tools_in_prompt=True, argument_form="mapping", results=True, several_calls=True, null_content=True
)
_BEFORE = replace(_FULL, text_beside_calls="before")
_ALTERNATING = replace(_FULL, text_beside_calls="nowhere", late_system=False, alternates=True)
_QWEN_35 = replace(
    _FULL,
    late_system=False,
    tool_format="qwen3_coder",
    reasoning=THINK,
    thinking_variable="enable_thinking",
)

FAMILIES: Mapping[str, tuple[str, TemplateProfile]] = {
    "SmolLM2": (CHATML, TemplateProfile()),
    "Qwen2.5": (QWEN_25, replace(_FULL, tool_format="hermes")),
    "Qwen3": (
        QWEN_3,
        replace(_FULL, tool_format="hermes", reasoning=THINK, thinking_variable="enable_thinking"),
    ),
    "Qwen3-Coder": (QWEN_3_CODER, replace(_FULL, tool_format="qwen3_coder")),
    "Qwen 3.5": (QWEN_35, _QWEN_35),
    "Qwen 3.5 0.8B": (QWEN_35_SMALL, replace(_QWEN_35, thinks_unasked=False)),
    "Nemotron 3": (NEMOTRON_3, replace(_QWEN_35, late_system=True)),
    "Nemotron Nano 2": (NEMOTRON_2, replace(_FULL, late_system=False, tool_format="nemotron", reasoning=THINK)),
    "Granite 4": (GRANITE_4, replace(_FULL, tool_format="hermes")),
    "Llama 3": (LLAMA_3, replace(_BEFORE, several_calls=False, tool_format="llama3_json")),
    "LFM2": (LFM_2, TemplateProfile(tools_in_prompt=True, tool_format="lfm2")),
    "LFM2.5": (LFM_25, replace(_FULL, null_content=False, tool_format="lfm2")),
    "pythonic": (PYTHONIC, replace(_BEFORE, tool_format="pythonic")),
    "Mistral v3": (MISTRAL, replace(_ALTERNATING, short_ids=True, tool_format="mistral")),
    "Mistral v11": (MISTRAL_11, replace(_ALTERNATING, tool_format="mistral_v11")),
    "Phi-4-mini": (PHI_4, TemplateProfile(tools_in_prompt=True, tool_format="phi4_mini")),
    "Phi-4-mini with functools": (
        PHI_4_FUNCTOOLS,
        replace(_BEFORE, argument_form="string", tool_format="functools"),
    ),
    "DeepSeek R1": (DEEPSEEK_R1, replace(_BEFORE, tool_format="deepseek_v3", reasoning=THINK)),
    "DeepSeek V3.1": (
        DEEPSEEK_V31,
        replace(
            _BEFORE,
            tool_format="deepseek_v31",
            reasoning=THINK,
            thinking_variable="thinking",
            thinks_unasked=False,
        ),
    ),
    "gpt-oss": (
        HARMONY,
        replace(_BEFORE, several_calls=False, late_system=False, takes_effort=True, tool_format="harmony"),
    ),
    "Granite 3": (GRANITE_3, TemplateProfile(reasoning=THINK, thinking_variable="thinking", thinks_unasked=False)),
    "GLM 4": (GLM_4, TemplateProfile()),
    "Gemma 2": (GEMMA_2, TemplateProfile(system=False, late_system=False, alternates=True)),
    "Gemma 4": (
        GEMMA_4,
        TemplateProfile(reasoning=CHANNEL, thinking_variable="enable_thinking", thinks_unasked=False),
    ),
}

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
F = Tool(name="find", description="Finds.", parameters={"properties": {"what": {"type": "string"}}})
USER = {"role": "user", "content": "Where is it?"}
CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": "find", "arguments": f'{{"what": "{what}"}}'}}
    for number, what in enumerate(("the ü", "the key"))
]


class Rendering:
    """As `Renderer` does, within this process."""

    def __init__(self, source: str) -> None:
        self.template = JinjaTemplate(ChatTemplate(source, TOKENS))
        self.count = 0

    def __call__(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> str | None:
        self.count += 1
        try:
            return self.template.render(messages, **options)
        except BadRequest:
            return None


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_known_by_what_their_templates_do(family: str) -> None:
    source, profile = FAMILIES[family]
    assert probed(source, Rendering(source)) == profile


@pytest.mark.cases(21)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_conversation_with_tools_is_rendered_whole_by_every_family(family: str, content: str | None) -> None:
    """No call, argument or result is lost, whatever the template supports."""
    source, profile = FAMILIES[family]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": content, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_0", "content": "On the table."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "In the door."}]},
    ]
    made = plan_answer(messages, profile, tools=[F])
    text = Rendering(source)(made.messages, tools=made.tools, template_kwargs=made.template_kwargs)
    assert text is not None
    for part in ("Be brief.", "Where is it?", "Finds.", "the ü", "the key", "On the table.", "In the door."):
        if not (family == "gpt-oss" and part == "Finds."):
            assert part in text, part
    assert not content or content in text or profile.text_beside_calls == "nowhere"
    assert "None" not in text
    assert '\\"what' not in text


@pytest.mark.parametrize("family", ["Qwen 3.5", "Qwen 3.5 0.8B", "Nemotron 3"])
@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, None),
        ({"reasoning": ReasoningSettings(effort="none")}, False),
        ({"reasoning": ReasoningSettings(effort="high")}, True),
        ({"template_kwargs": {"enable_thinking": False}}, False),
        ({"template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_switches_of_thinking_reach_the_template(family: str, asked: dict[str, Any], thinks: bool | None) -> None:
    """What is thought, and what is said behind it, comes out apart, also where the prompt has begun or ended it."""
    source, profile = FAMILIES[family]
    made = plan_answer([USER], profile, **asked)
    text = Rendering(source)(made.messages, template_kwargs=made.template_kwargs)
    assert text is not None
    thinks = profile.thinks_unasked if thinks is None else thinks
    assert text.rstrip().endswith("<think>" if thinks else "</think>")
    reader = made.reading(text).reader()
    reader.push("Hm.\n</think>\n\nThere." if thinks else "There.")
    reader.end(cut=False)
    assert (reader.reasoning.strip(), reader.text.strip()) == ("Hm." if thinks else "", "There.")


@pytest.mark.parametrize("family", ["Qwen 3.5", "Nemotron 3", "Nemotron Nano 2"])
def test_call_behind_thoughts_is_read(family: str) -> None:
    source, profile = FAMILIES[family]
    made = plan_answer([USER], profile, tools=[F])
    text = Rendering(source)(made.messages, tools=made.tools, template_kwargs=made.template_kwargs)
    assert text is not None
    written = {
        "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=what>\nit\n</parameter>\n</function>\n</tool_call>",
        "nemotron": '<TOOLCALL>[{"name": "find", "arguments": {"what": "it"}}]</TOOLCALL>',
    }
    reader = made.reading(text).reader()
    reader.push(f"Hm.\n</think>\n\n{written[profile.tool_format]}")
    reader.end(cut=False)
    [call] = reader.calls
    assert (reader.reasoning.strip(), call.name, json.loads(call.arguments)) == ("Hm.", "find", {"what": "it"})


def test_template_that_treats_all_messages_alike_is_not_probed() -> None:
    rendering = Rendering(CHATML)
    assert probed(CHATML, rendering) == TemplateProfile()
    assert rendering.count == 0


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no tool') }}",
        "{% if tools %}{{ tools.nothing.at.all }}{% endif %}{{ messages[0].content }}",
        "{{ tools }} {{ messages | length / 0 }}",
        "{% tool %}",
    ],
)
def test_template_that_fails_is_one_without_support(source: str) -> None:
    assert probed(source, Rendering(source)).tools_in_prompt is False
    assert probed(source, Rendering(source)).argument_form is None


def test_template_with_tools_and_an_unknown_format_is_told_how_to_call(caplog: pytest.LogCaptureFixture) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.tool_calls }}\n{% endfor %}"
    profile = probed(source, Rendering(source))
    assert (profile.tool_format, profile.tools_in_prompt) == ("generic", False)
    assert "Set tool_format" in caplog.text


def test_format_that_an_operator_sets_is_taken() -> None:
    assert probed(QWEN_25, Rendering(QWEN_25), "pythonic").tool_format == "pythonic"
    generic = probed(QWEN_25, Rendering(QWEN_25), "generic")
    assert (generic.tools_in_prompt, generic.argument_form, generic.results) == (False, None, False)
    [system, _] = plan_answer([USER], probed(CHATML, Rendering(CHATML), "pythonic"), tools=[F]).messages
    assert "\n[name(argument='value')]\n" in str(system["content"])


def tokenizer_with(source: str, *special: str) -> Tokenizer:
    # A copy: the tests share the one that is cached.
    core = tokenizers.Tokenizer.from_str(byte_level_core().to_str())
    core.add_special_tokens(list(special))
    return Tokenizer(core, chat_template=ChatTemplate(source, TOKENS))


def test_markers_that_are_special_tokens_are_found() -> None:
    with closing(tokenizer_with(MISTRAL, "[TOOL_CALLS]", "[INST]")) as tokenizer:
        marker = tokenizer.special_id("[TOOL_CALLS]")
        assert marker is not None
        assert profile_of(tokenizer) == replace(FAMILIES["Mistral v3"][1], special_ids={"[TOOL_CALLS]": marker})
    with closing(tokenizer_with(GEMMA_4, "<|channel>", "<channel|>")) as tokenizer:
        assert set(profile_of(tokenizer).special_ids) == {"<|channel>", "<channel|>"}


def test_model_without_a_template_has_no_support() -> None:
    assert profile_of(Tokenizer(byte_level_core())) == TemplateProfile()


def test_unknown_format_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"Unknown tool format 'xml'\. Choose one of auto, harmony, ") as raised:
        profile_of(Tokenizer(byte_level_core()), "xml")
    assert raised.value.param == "tool_format"


@pytest.mark.full
def test_template_that_hangs_with_tools_is_one_without_support(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed twice, and then let be."""
    monkeypatch.setattr("ostro.text.renderer.RenderLimits", partial(RenderLimits, seconds=0.3))
    hang = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if tools %}}{hang}{{% endif %}}{{{{ messages[0].content }}}}"
    with closing(tokenizer_with(source)) as tokenizer:
        assert profile_of(tokenizer).tools_in_prompt is False


def test_setting_takes_the_formats_that_there_are() -> None:
    assert get_args(ToolFormat) == ("auto", *TOOL_FORMATS)
