"""Short chat templates with the structure of well-known families': what they show, and what they refuse."""

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_CHATML_HEAD = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools>' }}
{{- '\\nCall one within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""

_CHATML_RESULT = """\
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
"""

QWEN_25 = (
    _CHATML_HEAD
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
       or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
"""
    + _CHATML_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QWEN_3 = (
    _CHATML_HEAD
    + """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set said = message.content or '' %}
{%- if '</think>' in said %}{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' + said }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
"""
    + _CHATML_RESULT
    + """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

QWEN_3_CODER = (
    _CHATML_HEAD
    + """\
{%- for message in messages %}
{%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
"""
    + _CHATML_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen 3.5's writes calls as Qwen3-Coder's, begins thoughts itself, and keeps those since the last question.
QWEN_35 = (
    _CHATML_HEAD
    + """\
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'system' and not loop.first %}{{- raise_exception('a system message comes first') }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.query %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
"""
    + _CHATML_RESULT
    + """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
)
QWEN_35_SMALL = QWEN_35.replace("is defined and enable_thinking is false", "is not defined or enable_thinking is false")
"""Does not think unasked."""

# Nemotron 3's shows tools as tags, and answers without thoughts behind an empty pair of tags.
NEMOTRON_3 = """\
{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}{{- '\\n\\n<tools>' }}
{%- for tool in tools %}{%- set tool = tool.function %}
{{- '\\n<function>\\n<name>' + tool.name + '</name>\\n<description>' + tool.description + '</description>' }}
{%- for name, field in tool.parameters.properties | items %}
{{- '\\n<parameter>\\n<name>' + name + '</name>\\n<type>' + field.type | string + '</type>\\n</parameter>' }}
{%- endfor %}{{- '\\n</function>' }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n<think></think>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{{- '<tool_call>\\n<function=' ~ call.name ~ '>\\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' ~ name ~ '>\\n' ~ value | string ~ '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- elif not loop.first or message.role == 'user' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think></think>') }}{%- endif %}"""

# Nemotron Nano 2's takes a list of calls, and turns thoughts off where a message says so.
NEMOTRON_2 = """\
{%- set state = namespace(thinks=true) %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') and '/no_think' in message.content %}{%- set state.thinks = false %}
{%- endif %}{%- endfor %}
{{- 'System\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- if tools %}{{- '\\n<AVAILABLE_TOOLS>' + tools | tojson + '</AVAILABLE_TOOLS>' }}
{{- '\\nWrite <TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '\\nUser\\n' + message.content }}
{%- elif message.role == 'tool' %}{{- '\\nUser\\n<TOOL_RESPONSE>[' + message.content + ']</TOOL_RESPONSE>' }}
{%- elif message.role == 'assistant' %}{{- '\\nAssistant\\n' + (message.content or '') }}
{%- if message.tool_calls %}{{- '<TOOLCALL>[' }}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- '{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' + (', ' if not loop.last else '') }}
{%- endfor %}{{- ']</TOOLCALL>' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '\\nAssistant\\n' + ('<think>\\n' if state.thinks else '<think></think>') }}{%- endif %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set order = messages[0].content %}{%- set messages = messages[1:] %}
{%- else %}{%- set order = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + order + '<|eot_id|>' }}
{%- if tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer in JSON: {"name": function, "parameters": values}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

PYTHONIC = """\
{%- if tools %}{{- '<|header_start|>system<|header_end|>\\n\\nFunctions: ' + (tools | tojson) + '<|eot|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
{%- if message.tool_calls %}{{- '[' }}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- call.name + '(' }}
{%- for name in call.arguments %}{{- name + '=' + (call.arguments[name] | tojson) }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|eot|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

_MISTRAL_ORDER = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set order = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set order = '' %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(users=0) %}
{%- for message in rest %}{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.users % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.users = ns.users + 1 %}{%- endif %}{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + (order if loop.last else '') + message.content + '[/INST]' }}
"""

MISTRAL = (
    _MISTRAL_ORDER.replace("loop.last", "loop.first")
    + """\
{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- else %}{{- raise_exception('unknown role') }}
{%- endif %}{%- endfor %}"""
)

MISTRAL_11 = (
    _MISTRAL_ORDER.replace("loop.last", "loop.first")
    + """\
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- endif %}{%- endfor %}"""
)

PHI_4 = """\
{%- for message in messages %}
{%- if message.role == 'system' and tools %}
{{- '<|system|>' + message.content + '<|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}
{%- else %}
{%- if loop.first and tools %}{{- '<|system|><|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}{%- endif %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

PHI_4_FUNCTOOLS = """\
{%- if tools %}{{- '<|system|>Answer with functools[...]. Tools: ' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{{- '<|assistant|>functools[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | string) + '}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']<|end|>' }}
{%- else %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

_DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{%- if tools %}{{- '\\n\\nTools: ' }}{%- for tool in tools %}
{{- tool.function.name + ': ' + tool.function.description }}
{{- (tool.function.parameters | tojson) + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls and message.content is none %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}{%- set call = call.function %}CALL{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1] %}{{- '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{%- endfor %}
"""

DEEPSEEK_R1 = (
    _DEEPSEEK.replace(
        "CALL",
        """\
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}
{{- (call.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}""",
    )
    + "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)

DEEPSEEK_V31 = (
    _DEEPSEEK.replace(
        "CALL",
        """\
{{- '<｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' + (call.arguments | tojson) + '<｜tool▁call▁end｜>' }}""",
    )
    + """\
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}
{%- if thinking is defined and thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}{%- endif %}"""
)

HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools or messages[0].role == 'system' %}{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\ntype ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}
{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# Its calls begin as Hermes's do, and go on in another way that is not known.
GLM_4 = """\
{%- if tools %}{{- '<|system|>\\nTools: ' + (tools | tojson) }}
{{- '\\nCall: <tool_call>{function-name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments | items %}
{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + value + '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}
{%- endfor %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

GEMMA_2 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('no system role') }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Gemma 4's reasoning is turned on by a token in the system message, and off by an empty thought at the prompt's end.
GEMMA_4 = """\
{{- bos_token }}
{%- set ordered = messages[0].role == 'system' %}
{%- if ordered or enable_thinking %}{{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') }}
{{- messages[0].content if ordered else '' }}{{- '<turn|>\\n' }}{%- endif %}
{%- for message in messages %}{%- if not (loop.first and ordered) %}
{{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}
{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}{%- endif %}"""

# LFM2's shows calls as Python has them; its first version showed tools alone.
_LFM_TOOLS = """\
{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{%- set first = first + ('\\n' if first else '') + 'List of tools: <|tool_list_start|>' %}
{%- set first = first + tools | tojson + '<|tool_list_end|>' %}
{%- endif %}
{%- if first %}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' }}{%- endif %}
"""
_LFM_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
LFM_2 = (
    _LFM_TOOLS
    + """\
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{%- set content = message.content if message.content is string else message.content | tojson %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- '<|tool_response_start|>' + content + '<|tool_response_end|>' if message.role == 'tool' else content }}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
"""
    + _LFM_END
)
LFM_25 = (
    _LFM_TOOLS
    + """\
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.tool_calls %}{{- '<|tool_call_start|>[' }}
{%- for call in message.tool_calls %}{%- set call = call.function %}{{- ', ' if not loop.first }}{{- call.name + '(' }}
{%- for name, value in call.arguments | items %}{{- ', ' if not loop.first }}
{{- name + '=' + ("'" + value + "'" if value is string else value | tojson) }}{%- endfor %}{{- ')' }}{%- endfor %}
{{- ']<|tool_call_end|>' }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
"""
    + _LFM_END
)

GRANITE_4 = """\
{%- set order = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{%- set shown = namespace(text=order + '\\n\\n<tools>') %}
{%- for tool in tools %}{%- set shown.text = shown.text + '\\n' + (tool | tojson) %}{%- endfor %}
{%- set order = shown.text + '\\n</tools>\\nFor each call, return JSON within <tool_call></tool_call> tags.' %}
{%- endif %}
{%- if order %}{{- '<|start_of_role|>system<|end_of_role|>' + order + '<|end_of_text|>\\n' }}{%- endif %}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content + '<|end_of_text|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|start_of_role|>assistant<|end_of_role|>' + content }}
{%- for call in message.tool_calls or [] %}{%- set call = call.function %}
{{- '\\n' if content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|end_of_text|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|start_of_role|>user<|end_of_role|>\\n<tool_response>\\n' + content + '\\n</tool_response><|end_of_text|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

# Granite 3's reasoning is turned on by an order to the model, and the prompt's end does not show it.
GRANITE_3 = """\
{%- if thinking %}<|start_of_role|>system<|end_of_role|>Think within <think></think> first.<|end_of_text|>
{% endif %}
{%- for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}<|end_of_text|>
{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
