"""A directory in which the docs' commands can be run as they stand: every model, adapter and file that they name.

What needs a network or a bucket has no stand-in here.
"""

import json
from pathlib import Path

import msgspec
import torch
from encoder_directory import CASES, reference, write_encoder
from model_directory import make_embedding_model, write_model
from peft_directory import random_adapter
from simulated import cost_table

from ostro.torch_models.build import build_model

# Hub ids too: a directory of that name comes before the Hub.
MODELS = (
    "my-model",
    "model",
    "hf-dir",
    "llama",
    "tiny",
    "tok",
    "Qwen/Qwen3-0.6B",
    "models/org/model",
    "models/small",
    "HRM-checkpoint-sudoku-extreme",
)
# Each with its number of labels: none for one that embeds.
ENCODERS = {"sentence-transformers/all-MiniLM-L6-v2": 0, "cross-encoder/ms-marco-MiniLM-L6-v2": 1}
ADAPTERS = ("adapter", "adapters/sql", "adapters/tone", "adapters/french")
CONTINUED = {"prompt": "The capital of France is", "continuation": " Paris"}
MESSAGES = [{"role": "user", "content": "Hello"}]


def write_scratch(directory: Path) -> Path:
    # Room for a description of tools, which its tokenizer takes nearly letter by letter.
    first = write_model(directory / MODELS[0], context=1024)
    for name in MODELS[1:]:
        place = directory / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(first, target_is_directory=True)
    make_embedding_model(write_model(directory / "base"))
    for name, labels in ENCODERS.items():
        write_encoder(directory / name, reference(CASES["bert"], labels=labels))
    shape = build_model(json.loads((first / "config.json").read_text()), dtype=torch.float32)
    for seed, name in enumerate(ADAPTERS):
        random_adapter(directory / name, shape, seed=seed)
    (directory / "prompts.txt").write_text("Hello\nOnce upon a time\n")
    (directory / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    (directory / "pairs.jsonl").write_text(json.dumps(CONTINUED) + "\n")
    (directory / "requests.jsonl").write_text(
        json.dumps(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": MESSAGES, "max_tokens": 4},
            }
        )
        + "\n"
    )
    (directory / "trace.jsonl").write_text(
        "".join(json.dumps({"timestamp": at / 10, "prompt": "Hello", "output_len": 4}) + "\n" for at in range(3))
    )
    (directory / "costs.json").write_bytes(msgspec.json.encode(cost_table(max_seq_len=4096)))
    (directory / "ostro.yaml").write_text("port: 8000\n")
    (directory / "train.yaml").write_text("model: {type: llama}\ntrainer: {mp: f32}\ndata: {tokenizer: ./tok}\n")
    return directory
