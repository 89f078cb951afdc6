"""The workloads that engines are measured on: prompts as token ids, and how many tokens each is continued by.

`nano` is the benchmark that nano-vllm publishes its figures for: 256 requests of 100 to 1024 tokens in and as many out.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LARGEST_TOKEN = 10_000


@dataclass(frozen=True, slots=True)
class Work:
    prompt: list[int]
    output: int


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randint(0, LARGEST_TOKEN) for _ in range(count)]


def nano(count: int = 256) -> list[Work]:
    dice = random.Random(0)
    prompts = [_tokens(dice, dice.randint(100, 1024)) for _ in range(count)]
    return [Work(prompt, dice.randint(100, 1024)) for prompt in prompts]


def fixed(count: int, length: int, output: int) -> list[Work]:
    dice = random.Random(0)
    return [Work(_tokens(dice, length), output) for _ in range(count)]


def shared_prefix(count: int, shared: int, own: int, output: int) -> list[Work]:
    dice = random.Random(0)
    prefix = _tokens(dice, shared)
    return [Work(prefix + _tokens(dice, own), output) for _ in range(count)]


WORKLOADS: Mapping[str, Callable[[], list[Work]]] = {
    "nano": nano,
    "single": lambda: fixed(1, 128, 512),
    "batch8": lambda: fixed(8, 128, 256),
    "chat256": lambda: fixed(256, 1000, 256),
    "prefill": lambda: fixed(64, 2048, 1),
    "shared": lambda: shared_prefix(256, 1500, 100, 128),
}
