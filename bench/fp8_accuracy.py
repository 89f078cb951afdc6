"""What 8-bit weights and 8-bit keys and values cost in accuracy, on the default model or another; needs no GPU.

    python bench/fp8_accuracy.py                 # a few minutes on two cores
    python bench/fp8_accuracy.py --model DIR

Everything is rounded as the GPU's kernels round it and computed in float32 on the CPU, which gives the same up to the
order of sums. Against the plain model in float32:

    text      perplexity of the opening of a novel; how far the predictions at each of its tokens moved (Kullback-
              Leibler divergence, and the share of tokens where the same one is thought the likeliest)
    greedy    64 tokens after each of 20 questions: the share that is equal, place by place, and where the first is
              not. Two answers that part at one close call have nothing to do with each other from there on.

Up to 16 rows at a time the GPU multiplies 8-bit weights by inputs that are not rounded: `weights`. More sequences, and
prompts, are rounded as well: `weights, inputs`. For scale, `bfloat16` rounds weights, inputs, keys and values to 16
bits, which is what a GPU does without being asked.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ostro import LLM, SamplingParams
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.kernels.gpu.fp8 import FP8, LARGEST, quantize_rows_plain, widened
from ostro.kernels.paged_attention import KVCache, PagedAttention, Piece
from ostro.models.architecture import AttentionSpec
from ostro.torch_models.base import AttentionContext, Model
from ostro.torch_models.decoder import DecoderLayer
from ostro.torch_models.layers import Linear

RESULTS = Path(__file__).parent / "results"
TOKENS = 64

# Lewis Carroll, Alice's Adventures in Wonderland, 1865.
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or \
twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what \
is the use of a book," thought Alice "without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), \
whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when \
suddenly a White Rabbit with pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit \
say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she \
ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually took a \
watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it flashed \
across her mind that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, \
and burning with curiosity, she ran across the field after it, and fortunately was just in time to see it pop down a \
large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.

The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that Alice \
had not a moment to think about stopping herself before she found herself falling down a very deep well.

Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look about her \
and to wonder what was going to happen next. First, she tried to look down and make out what she was coming to, but \
it was too dark to see anything; then she looked at the sides of the well, and noticed that they were filled with \
cupboards and book-shelves; here and there she saw maps and pictures hung upon pegs. She took down a jar from one of \
the shelves as she passed; it was labelled "ORANGE MARMALADE", but to her great disappointment it was empty: she did \
not like to drop the jar for fear of killing somebody underneath, so managed to put it into one of the cupboards as \
she fell past it.

"Well!" thought Alice to herself, "after such a fall as this, I shall think nothing of tumbling down stairs! How \
brave they'll all think me at home! Why, I wouldn't say anything about it, even if I fell off the top of the house!" \
(Which was very likely true.)

Down, down, down. Would the fall never come to an end? "I wonder how many miles I've fallen by this time?" she said \
aloud. "I must be getting somewhere near the centre of the earth. Let me see: that would be four thousand miles down, \
I think--" (for, you see, Alice had learnt several things of this sort in her lessons in the schoolroom, and though \
this was not a very good opportunity for showing off her knowledge, as there was no one to listen to her, still it \
was good practice to say it over) "--yes, that's about the right distance--but then I wonder what Latitude or \
Longitude I've got to?" (Alice had no idea what Latitude was, or Longitude either, but thought they were nice grand \
words to say.)

Presently she began again. "I wonder if I shall fall right through the earth! How funny it'll seem to come out among \
the people that walk with their heads downward! The Antipathies, I think--" (she was rather glad there was no one \
listening, this time, as it didn't sound at all the right word) "--but I shall have to ask them what the name of the \
country is, you know. Please, Ma'am, is this New Zealand or Australia?" (and she tried to curtsey as she spoke--fancy \
curtseying as you're falling through the air! Do you think you could manage it?) "And what an ignorant little girl \
she'll think me for asking! No, it'll never do to ask: perhaps I shall see it written up somewhere."

Down, down, down. There was nothing else to do, so Alice soon began talking again. "Dinah'll miss me very much \
to-night, I should think!" (Dinah was the cat.) "I hope they'll remember her saucer of milk at tea-time. Dinah my \
dear! I wish you were down here with me! There are no mice in the air, I'm afraid, but you might catch a bat, and \
that's very like a mouse, you know. But do cats eat bats, I wonder?" And here Alice began to get rather sleepy, and \
went on saying to herself, in a dreamy sort of way, "Do cats eat bats? Do cats eat bats?" and sometimes, "Do bats eat \
cats?" for, you see, as she couldn't answer either question, it didn't much matter which way she put it.
"""

QUESTIONS = (
    "What is the capital of France?",
    "Explain how rain forms.",
    "Write a short story about a lighthouse.",
    "Why is the sky blue?",
    "List five uses of a paper clip.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Who was Isaac Newton?",
    "How do vaccines work?",
    "Translate 'good morning' into Spanish.",
    "What is the difference between a virus and a bacterium?",
    "Write a poem about autumn.",
    "How many continents are there, and what are they called?",
    "Describe the water cycle to a child.",
    "What is a prime number?",
    "Suggest a name for a small bakery.",
    "How does a bicycle stay upright?",
    "Summarise the story of Romeo and Juliet.",
    "What should I pack for a weekend in the mountains?",
    "Write a Python function that reverses a string.",
)


Rounding = Callable[[Tensor], Tensor]


def by_rows(x: Tensor) -> Tensor:
    """Rounded to 8 bits, each row with its own scale."""
    return widened(*quantize_rows_plain(x))


def unscaled(x: Tensor) -> Tensor:
    """Rounded to 8 bits, as the cache keeps keys and values."""
    return x.clamp(-LARGEST, LARGEST).to(FP8).float()


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


@dataclass(frozen=True, slots=True)
class Variant:
    """What is rounded, and how."""

    name: str
    weights: Rounding | None = None
    inputs: Rounding | None = None
    keys: Rounding | None = None


VARIANTS = (
    Variant("plain"),
    Variant("bfloat16", weights=to_bfloat16, inputs=to_bfloat16, keys=to_bfloat16),
    Variant("weights", weights=by_rows),
    Variant("weights, inputs", weights=by_rows, inputs=by_rows),
    Variant("keys and values", keys=unscaled),
    Variant("all", weights=by_rows, inputs=by_rows, keys=unscaled),
)


@dataclass(frozen=True, slots=True)
class Row:
    variant: str
    perplexity: float
    nats_lost: float
    """Log-probability lost per token of the text, against the plain model."""
    nats_error: float
    """Its standard error."""
    divergence: float
    """Mean Kullback-Leibler divergence from the plain model's predictions, in nats."""
    divergence_from_bfloat16: float | None
    """The same from those of `bfloat16`, once it was measured."""
    same_likeliest: float
    same_tokens: float
    same_answers: float
    first_difference: float
    """Median place of the first token that differs; TOKENS where none does."""
    seconds: float


class RoundedLinear(Linear):
    def __init__(self, plain: Linear, weights: Rounding, inputs: Rounding | None) -> None:
        super().__init__(plain.weight.shape[1], plain.weight.shape[0])
        self.weight.data = weights(plain.weight.data)
        self.bias = plain.bias
        self.inputs = inputs

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().matmul(x if self.inputs is None else self.inputs(x), bias)


class RoundedKeys:
    """An attention context that rounds keys and values before it hands them on to be kept."""

    def __init__(self, context: AttentionContext, rounding: Rounding) -> None:
        self.context, self.rounding = context, rounding

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        return self.context.attend(layer, q, self.rounding(k), self.rounding(v), spec, sinks)

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        return self.context.attend_stored(layer, q, spec)


def apply(variant: Variant, model: Model) -> None:
    if (weights := variant.weights) is not None:
        for layer in [module for module in model.modules() if isinstance(module, DecoderLayer)]:
            for parent in list(layer.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, Linear):
                        setattr(parent, name, RoundedLinear(child, weights, variant.inputs))
    if (keys := variant.keys) is not None:
        forward = model.forward
        # Modules are called through `forward`, and an instance's own comes before its class's.
        model.__dict__["forward"] = lambda ids, positions, ctx: forward(ids, positions, RoundedKeys(ctx, keys))


@torch.inference_mode()
def predictions(model: Model, ids: list[int]) -> Tensor:
    """Log-probabilities of every token after each of the text's, [tokens - 1, vocabulary]."""
    shape = model.shape
    cache = torch.zeros(shape.num_layers, 2, shape.num_kv_heads, len(ids), shape.head_dim)
    context = PagedAttention(KVCache.of(cache), [Piece(0, 0, len(ids), range(len(ids)))], page_size=1)
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), context)
    return model.logits(hidden[:-1]).log_softmax(-1)


def answers(llm: LLM) -> list[list[int]]:
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    return [completion.choices[0].token_ids for completion in llm.generate(prompts, params)]


@dataclass(frozen=True, slots=True)
class Found:
    predictions: Tensor
    answers: list[list[int]]


def divergence(found: Tensor, true: Tensor) -> float:
    return (true.exp() * (true - found)).sum(-1).mean().item()


def measure(variant: Variant, config: EngineConfig, plain: Found | None, rounded: Found | None) -> tuple[Row, Found]:
    started = time.perf_counter()
    llm = LLM(config=config)
    runner = llm.core.runner
    assert isinstance(runner, TorchRunner)
    apply(variant, runner.model)
    ids = llm.tokenizer.encode(TEXT)
    found = Found(predictions(runner.model, ids), answers(llm))
    plain = plain or found
    target = torch.tensor(ids[1:])[:, None]
    own, other = (each.predictions.gather(1, target)[:, 0] for each in (found, plain))
    pairs = list(zip(found.answers, plain.answers, strict=True))
    row = Row(
        variant=variant.name,
        perplexity=math.exp(-own.mean().item()),
        nats_lost=(other - own).mean().item(),
        nats_error=(other - own).std().item() / len(own) ** 0.5,
        divergence=divergence(found.predictions, plain.predictions),
        divergence_from_bfloat16=None if rounded is None else divergence(found.predictions, rounded.predictions),
        same_likeliest=(found.predictions.argmax(-1) == plain.predictions.argmax(-1)).float().mean().item(),
        same_tokens=statistics.mean(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)),
        same_answers=statistics.mean(ours == theirs for ours, theirs in pairs),
        first_difference=statistics.median(first_difference(*pair) for pair in pairs),
        seconds=time.perf_counter() - started,
    )
    return row, found


def first_difference(ours: list[int], theirs: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--save", type=Path, default=RESULTS / "fp8_accuracy.json")
    args = parser.parse_args()

    # Without a prefix cache each variant computes its own keys.
    config = EngineConfig(model=args.model, device="cpu", backend="torch", prefix_caching=False, kv_memory=256 << 20)
    rows: list[Row] = []
    plain: Found | None = None
    rounded: Found | None = None
    print(
        f"{'':22} {'perplexity':>10} {'nats lost':>16} {'divergence':>10} {'from bfloat16':>13} {'same likeliest':>14} "
        f"{'same tokens':>11} {'same answers':>12} {'first differs at':>16}"
    )
    for variant in VARIANTS:
        row, found = measure(variant, config, plain, rounded)
        plain = plain or found
        if variant.name == "bfloat16":
            rounded = found
        rows.append(row)
        from_rounded = "" if row.divergence_from_bfloat16 is None else f"{row.divergence_from_bfloat16:.5f}"
        print(
            f"{row.variant:<22} {row.perplexity:>10.3f} {row.nats_lost:>8.4f} ±{row.nats_error:.4f} "
            f"{row.divergence:>10.5f} {from_rounded:>13} {row.same_likeliest:>14.1%} "
            f"{row.same_tokens:>11.1%} {row.same_answers:>12.0%} {row.first_difference:>16}",
            flush=True,
        )
    assert plain is not None
    record = {
        "model": args.model or "the default model",
        "text_tokens": len(plain.predictions) + 1,
        "questions": len(QUESTIONS),
        "tokens_an_answer": TOKENS,
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    args.save.parent.mkdir(parents=True, exist_ok=True)
    args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
