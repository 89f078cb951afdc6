"""A whole tiny model on disk, as it would come from a hub: config, random weights, tokenizer, chat template."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The native core runs it: heads are 16 wide.
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 48, 2, 2, 1, 256
_CORPUS = ["the quick brown fox jumps over the lazy dog and the dog does not mind", "system user assistant: yes, no"]


def write_model(
    directory: Path,
    *,
    chat_template: str | None = CHATML,
    seed: int = 0,
    heads: int = HEADS,
    context: int = CONTEXT,
) -> Path:
    """A Llama whose greedy choices are clear and depend on all of the context. Not trained: it babbles.

    Without a template its tokens identify none either. More heads are narrower: too narrow for the native core.
    """
    directory.mkdir(parents=True, exist_ok=True)
    core = _tokenizer(SPECIAL if chat_template is not None else [SPECIAL[0], "<|begin|>", SPECIAL[2]])
    core.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": chat_template})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": core.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads * KV_HEADS // HEADS,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    _write(directory / "config.json", config)
    _save(_weights(core.get_vocab_size(), seed), directory)
    return directory


def pickle_weights(directory: Path, num_files: int = 1) -> Path:
    """The model with its weights as transformers wrote them before it had safetensors."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    write_pickles(directory, weights, num_files)
    return directory


def write_pickles(directory: Path, weights: Mapping[str, torch.Tensor], num_files: int) -> None:
    if num_files == 1:
        torch.save(dict(weights), directory / "pytorch_model.bin")
        return
    files = [f"pytorch_model-{number:05}-of-{num_files:05}.bin" for number in range(1, num_files + 1)]
    places = {name: files[number % num_files] for number, name in enumerate(weights)}
    for file in files:
        torch.save({name: weights[name] for name, place in places.items() if place == file}, directory / file)
    _write(directory / "pytorch_model.bin.index.json", {"weight_map": places})


def write_cycling_model(directory: Path, text: str = "abc") -> Path:
    """A model that says the characters of the text again and again, whatever it is asked, nearly surely when drawn too.

    Its layers add nothing, so that a token's embedding alone decides on the next one.
    """
    write_model(directory)
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    cycle = [core.token_to_id(character) for character in text]
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    # Orthogonal, and one for all tokens that are no part of the cycle: they lead to its beginning.
    states = torch.eye(HIDDEN)[: len(cycle)]
    weights["model.embed_tokens.weight"][:] = states[-1]
    weights["lm_head.weight"].zero_()
    for at, token in enumerate(cycle):
        weights["model.embed_tokens.weight"][token] = states[at]
        weights["lm_head.weight"][token] = 10 * states[at - 1]
    weights["model.norm.weight"].fill_(1.0)
    _save(weights, directory)
    return directory


def make_embedding_model(directory: Path, mode: Literal["mean", "cls", "lasttoken"] = "mean") -> Path:
    """Adds the files that make a model pool its vectors and normalise them."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    _write(directory / "1_Pooling" / "config.json", {"pooling_mode": mode})
    return directory


def _save(weights: dict[str, torch.Tensor], directory: Path) -> None:
    """With a fixed time, so that equal models are packed once for all tests: packing imports torch, for seconds."""
    save_file(weights, directory / "model.safetensors")
    os.utime(directory / "model.safetensors", ns=(0, 0))


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value))


def _tokenizer(special: list[str]) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(special)
    return core


def _weights(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }
