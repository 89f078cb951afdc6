"""A tiny language model on disk that judges pairs of texts, like Qwen3-Reranker."""

import json
from collections.abc import Mapping
from pathlib import Path

from model_directory import write_model

INSTRUCTION = "is the dog in the Document"
# In the manner of Qwen3-Reranker's: the instruction is in the turn of the user.
TEMPLATE = (
    '<|im_start|>system\nsay "yes" or "no"<|im_end|>\n<|im_start|>user\n'
    '<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("") }}\n'
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_judge(
    directory: Path,
    *,
    scoring: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    modules: tuple[str, ...] = ("Transformer", "LogitScore"),
    template: str | None = TEMPLATE,
    activation: str | None = None,
) -> Path:
    """A tiny model with the files that sentence-transformers writes."""
    write_model(directory, chat_template=template)
    named = [{"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"st.{kind}"} for at, kind in enumerate(modules)]
    prompts = {"prompts": {"query": INSTRUCTION}, "default_prompt_name": "query"}
    variables = {"chat_template": {"add_generation_prompt": True}}
    files: Mapping[str, object] = {
        "modules.json": named,
        "1_LogitScore/config.json": {"true_token_id": 40, "false_token_id": 31, **(scoring or {})},
        "sentence_bert_config.json": {"processing_kwargs": variables, **(settings or {})},
        "config_sentence_transformers.json": {**prompts, **({"activation_fn": activation} if activation else {})},
    }
    (directory / "1_LogitScore").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory
