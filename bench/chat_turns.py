"""A chat of eight turns whose template drops earlier thinking: how much of each prompt is computed a second time?

    python bench/chat_turns.py                              # a tiny random Qwen3.5, natively
    python bench/chat_turns.py --backend torch
    python bench/chat_turns.py --template FILE.jinja        # another template in the manner of ChatML

A model whose layers keep a state can only continue where a snapshot of it was taken. The answer's tokens are rendered
without their thinking in the next turn, so no state that followed them fits: what does is the snapshot at the last page
before the end of the question. From the second turn on, a prompt may therefore compute again

    the answer of the turn before, and what the page holds of the question before it: less than one page

beside its own question, which is new. That is the bar; the exit status is 1 if a turn misses it. Every turn sends all
that was said before, answers with their `reasoning_content`, as clients do.

The table's `shared` is how many tokens the prompt begins with as the one before it did: the most that any cache could
give. It ends within the answer's opening, where the turn before began to think. The answer behind it was computed after
those thoughts, and the question never, so that two messages are new to every server: "at most one message and a page"
cannot hold for all that is computed, only for what is computed again.
"""

import argparse
import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from random_model import write_weights
from serving import serving

TURNS, THINKING, ANSWER = 8, 40, 70
"""Turns of the chat, and tokens of each turn's thinking and of its answer."""
PAGE_SIZE = 16
END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, "<think>", "</think>")
TEMPLATE = """
{%- set last = namespace(query=-1) %}
{%- for message in messages if message.role == "user" %}
    {%- set last.query = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.reasoning_content and loop.index0 > last.query %}
        {{- "<think>\n" + message.reasoning_content + "\n</think>\n\n" }}
    {%- endif %}
    {{- message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n<think>\n" }}
{%- endif %}
"""
CONFIG: Mapping[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int
    cached: int
    answer: int
    """Tokens of the answer of the turn before, as this prompt has it; 0 in the first turn."""
    question: int
    """Tokens that are new: the question, and what the template adds behind it. In the first turn that is all."""
    shared: int = 0
    """Tokens at its beginning that the prompt of the turn before began with too."""

    @property
    def again(self) -> int:
        """Tokens that are computed though the turn before had computed or generated them."""
        return self.prompt - self.cached - self.question

    @property
    def missed(self) -> int:
        """Tokens that a cache without pages could have given besides."""
        return self.shared - self.cached

    def holds(self, page_size: int) -> bool:
        """Whether at most one message and a page were computed again; the first turn has none before it."""
        return self.answer == 0 or self.again <= self.answer + page_size


def turn_of(ids: Sequence[int], cached: int, ends: Collection[int], earlier: Sequence[int] = ()) -> Turn:
    """A turn by its prompt, the tokens that end messages in it, and the prompt of the turn before."""
    *before, question, opening = message_lengths(ids, ends)
    # A system message and a question at most: there is no turn before this one.
    if len(before) < _MESSAGES_OF_A_TURN:
        return Turn(len(ids), cached, answer=0, question=len(ids))
    pairs = enumerate(zip(ids, earlier, strict=False))
    shared = next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(ids), len(earlier)))
    return Turn(len(ids), cached, before[-1], question + opening, shared)


_MESSAGES_OF_A_TURN = 2


def message_lengths(ids: Sequence[int], ends: Collection[int]) -> list[int]:
    """Tokens of each message, its end included; the last is what follows the last end."""
    places = [0, *(at + 1 for at, token in enumerate(ids) if token in ends), len(ids)]
    return [end - begin for begin, end in pairwise(places)]


def table(turns: Sequence[Turn], page_size: int) -> Iterator[str]:
    yield f"{'turn':>4} {'prompt':>7} {'shared':>7} {'cached':>7} {'new':>5} {'again':>6} {'answer + page':>14}"
    for number, turn in enumerate(turns, 1):
        most = f"{turn.answer} + {page_size}" if turn.answer else "-"
        verdict = "" if turn.holds(page_size) else "  too many"
        counts = f"{turn.prompt:>7} {turn.shared:>7} {turn.cached:>7} {turn.question:>5} {turn.again:>6}"
        yield f"{number:>4} {counts} {most:>14}{verdict}"


def play(url: str, num_turns: int = TURNS) -> list[Turn]:
    """A whole chat with the server's model. Questions and answers differ in length, and so in where pages end."""
    dice = random.Random(0)
    [end] = [_ask(url, "/tokenize", {"prompt": END, "add_special_tokens": False})["tokens"]]
    messages: list[Message] = [{"role": "system", "content": "You are terse, and you are never wrong."}]
    turns: list[Turn] = []
    earlier: list[int] = []
    for number in range(num_turns):
        words = " ".join(dice.choice(_WORDS) for _ in range(dice.randrange(4, 24)))
        messages.append({"role": "user", "content": f"Question {number}: {words}?"})
        ids = _ask(url, "/tokenize", {"messages": messages})["tokens"]
        thinking, answer = dice.randrange(1, THINKING), dice.randrange(1, ANSWER)
        asked = {"temperature": 0, "thinking_budget": thinking, "max_tokens": thinking + answer}
        answered = _ask(url, "/v1/chat/completions", {"messages": messages, **asked})
        usage, message = answered["usage"], answered["choices"][0]["message"]
        assert usage["prompt_tokens"] == len(ids), "the prompt is tokenised alike everywhere"
        turns.append(turn_of(ids, usage["prompt_tokens_details"]["cached_tokens"], end, earlier))
        earlier = ids
        assert all(message[name] for name in ("reasoning_content", "content")), "thinking, and an answer behind it"
        messages.append({name: message[name] for name in ("role", "content", "reasoning_content")})
    return turns


_WORDS = ("why", "does", "the", "tide", "turn", "when", "rivers", "freeze", "over", "slowly", "and", "nobody", "looks")


def _ask(url: str, path: str, body: Mapping[str, object]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def write_model(directory: Path, template: str = TEMPLATE) -> Path:
    """A tiny Qwen3.5 of random weights that says what clients can send back: printable ASCII, a token a character."""
    core = tokenizers.Tokenizer(
        models.BPE(dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), range(256), strict=True)), [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    write_weights({**CONFIG, "vocab_size": core.get_vocab_size()}, directory, dtype="float32", spread=0.3)
    weights = load_file(directory / "model.safetensors")
    printable = [core.token_to_id(chr(code)) for code in range(ord("!"), ord("~") + 1)]
    silent = [token for token in range(core.get_vocab_size()) if token not in printable]
    # Some of a hundred random logits are above 0.
    weights["lm_head.weight"][silent] = 0
    save_file(weights, directory / "model.safetensors")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    parser.add_argument("--template", type=Path, help="a chat template of ChatML that drops earlier thinking")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    args = parser.parse_args()
    if args.backend == "native" and args.page_size != PAGE_SIZE:
        parser.error(f"the native core has pages of {PAGE_SIZE} tokens; give --backend torch too")
    template = TEMPLATE if args.template is None else args.template.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch), template)
        options = ["--model", str(model), "--backend", args.backend, "--device", "cpu", "--kv-memory", "64M"]
        with serving(*options, "--page-size", str(args.page_size)) as server:
            turns = play(f"http://{server.host}:{server.port}", args.turns)
    for line in table(turns, args.page_size):
        print(line)
    if not all(turn.holds(args.page_size) for turn in turns):
        print("More than one message and a page was computed again.")
        sys.exit(1)


if __name__ == "__main__":
    main()
