"""Matchers for texts, without a model: what a grammar accepts, and random outputs under its masks."""

import random
from functools import cache

from text_vocabs import byte_level, sentencepiece_like

from ostro.engine.constraint import Constraint, Matcher
from ostro.grammar.check import check_structured
from ostro.grammar.compiler import GrammarCompiler
from ostro.structured import StructuredOutput
from ostro.text.tokenizer import Tokenizer

VOCABULARIES = {"byte_level": byte_level, "sentencepiece": sentencepiece_like}


@cache
def compiler(name: str = "byte_level", padding: int = 3) -> GrammarCompiler:
    """`padding` is how much wider the logits are than the vocabulary."""
    tokenizer = VOCABULARIES[name]()
    return GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size + padding)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {tokenizer.token_text(token): token for token in tokenizer.special_ids}


def constraint_of(name: str = "byte_level", /, **fields: object) -> Constraint:
    """The constraint that a structured output compiles to."""
    structured = StructuredOutput(**fields)  # type: ignore[arg-type]
    vocabulary = compiler(name).vocabulary
    return check_structured(structured, special_ids(VOCABULARIES[name]()), vocabulary.tokenizer)


def start(constraint: Constraint, name: str = "byte_level") -> Matcher:
    return compiler(name).prepare(constraint).start()


def tokens_of(text: str, name: str = "byte_level") -> list[int]:
    """The text's usual tokenization; a text has many others."""
    return list(compiler(name).vocabulary.tokenizer.tokenize_str(text))


def allowed(matcher: Matcher) -> set[int] | None:
    """The tokens that may come next; None if any may."""
    words = matcher.mask()
    if words is None:
        return None
    return {32 * index + bit for index, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}


def accepts(constraint: Constraint, text: str, name: str = "byte_level") -> bool:
    """Whether the text is a complete output: the masks allow it in at least one tokenization, and then the end."""
    tokenizer, matcher, rest = VOCABULARIES[name](), start(constraint, name), text.encode()
    while rest:
        may = set() if matcher.is_done else allowed(matcher)
        fitting = [
            token
            for token in (range(tokenizer.vocab_size) if may is None else may)
            if (data := tokenizer.token_bytes(token)) and rest.startswith(data) and token not in tokenizer.special_ids
        ]
        if not fitting:
            return False
        token = max(fitting, key=lambda each: len(tokenizer.token_bytes(each)))
        matcher.take(token)
        rest = rest[len(tokenizer.token_bytes(token)) :]
    may = allowed(matcher)
    return matcher.is_done or may is None or bool(may & tokenizer.eos_ids)


def random_output(constraint: Constraint, seed: int, name: str = "byte_level", most: int = 200) -> str | None:
    """A random output under the masks; None if it is not finished after `most` tokens."""
    tokenizer, matcher, draw = VOCABULARIES[name](), start(constraint, name), random.Random(seed)
    output = b""
    for _ in range(most):
        if matcher.is_done:
            return output.decode()
        for token in matcher.forced():
            matcher.take(token)
            output += tokenizer.token_bytes(token)
        may = sorted(allowed(matcher) or ())
        token = draw.choice(may)
        if token in tokenizer.eos_ids:
            return output.decode()
        matcher.take(token)
        output += tokenizer.token_bytes(token)
    return None
