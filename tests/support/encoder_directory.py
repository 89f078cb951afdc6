"""Tiny encoders on disk, as they would come from a hub: transformers' weights, a tokenizer of BERT's kind, modules."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
import torch
import transformers
from every_family import ENCODER_CASES
from family_case import Config
from safetensors.torch import save_file
from telling_weights import telling
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TEXT = "the quick brown fox jumps over a lazy dog and does not mind what is capital of france paris query"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = 64
TINY: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
CASES: Mapping[str, Config] = {
    f"{name}-{variant}" if variant else name: case.sized(TINY, variant)
    for name, case in ENCODER_CASES.items()
    for variant in ("", *case.variants)
}
# Heads as wide as the native core wants them, and an inner width that is no multiple of most panels.
WIDE: Mapping[str, Config] = {
    name: {**values, "hidden_size": 64, "intermediate_size": 88, "max_position_embeddings": 320}
    for name, values in CASES.items()
}


def reference(values: Config, *, labels: int = 0, seed: int = 0) -> transformers.PreTrainedModel:
    """Transformers' model, a classifier if it has labels."""
    settings = {name: value for name, value in values.items() if name != "model_type"}
    if labels:
        settings["num_labels"] = labels
    config = transformers.AutoConfig.for_model(values["model_type"], **settings)
    auto = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    return telling(auto.from_config(config, attn_implementation="eager"), seed=seed)


def write_encoder(directory: Path, model: transformers.PreTrainedModel, settings: Config | None = None) -> Path:
    """The model with a tokenizer; `settings` change its config.json."""
    model.save_pretrained(directory)
    write_json(directory / "config.json", json.loads((directory / "config.json").read_text()) | dict(settings or {}))
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def tokenizer() -> tokenizers.Tokenizer:
    vocabulary = [*SPECIAL, *TEXT.split(), *"abcdefghijklmnopqrstuvwxyz"]
    core = tokenizers.Tokenizer(
        models.WordPiece({piece: id for id, piece in enumerate(dict.fromkeys(vocabulary))}, unk_token="[UNK]")
    )
    core.normalizer = normalizers.BertNormalizer()
    core.decoder = decoders.WordPiece()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.add_special_tokens(SPECIAL)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", SPECIAL.index("[CLS]")), ("[SEP]", SPECIAL.index("[SEP]"))],
    )
    return core


def add_modules(
    directory: Path,
    mode: str = "mean",
    *,
    normalize: bool = True,
    dense: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    max_seq_length: int | None = None,
) -> Path:
    """Adds what sentence-transformers writes; `dense` has weights and biases of layers with tanh."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    paths = ["" if kind == "Transformer" else f"{at}_{kind}" for at, kind in enumerate(kinds)]
    modules = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    write_json(directory / paths[1] / "config.json", {"pooling_mode": mode})
    for path, (weight, bias) in zip(paths[2:], dense, strict=False):
        rows, columns = weight.shape
        write_json(directory / path / "config.json", {"in_features": columns, "out_features": rows})
        save_file({"linear.weight": weight, "linear.bias": bias}, directory / path / "model.safetensors")
    if prompts is not None:
        settings = {"prompts": dict(prompts), "default_prompt_name": default_prompt}
        write_json(directory / "config_sentence_transformers.json", settings)
    if max_seq_length is not None:
        write_json(directory / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    return directory


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
