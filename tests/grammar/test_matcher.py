"""Matchers: masks, forced tokens, where an output may end, and where it fails."""

import json
import threading
from dataclasses import replace
from typing import cast

import pytest
from constrained_text import (
    VOCABULARIES,
    accepts,
    allowed,
    compiler,
    constraint_of,
    random_output,
    start,
    tokens_of,
)
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from text_vocabs import byte_level, control_ids

from ostro.engine.constraint import Constraint, Matcher
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.errors import BadRequest, SequenceFailed, StructureFailed
from ostro.grammar.compiler import GrammarCompiler
from ostro.grammar.matcher import GrammarMatcher
from ostro.sampling_params import SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def take_all(matcher: Matcher, text: str) -> None:
    for token in tokens_of(text):
        matcher.take(token)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("jump_forward", [False, True])
@given(seed=st.integers(0, 2**32))
def test_any_output_under_the_masks_has_the_structure(name: str, jump_forward: bool, seed: int) -> None:
    made = constraint_of(name, json_schema=json.dumps(PERSON), jump_forward=jump_forward)
    output = random_output(made, seed, name)
    if output is not None:
        person = json.loads(output)
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 8
        assert 0 <= person["age"] <= 150


def test_a_mask_is_as_wide_as_the_logits_and_allows_nothing_beyond_the_vocabulary() -> None:
    width = byte_level().vocab_size + 3
    words = start(constraint_of(regex="(.|\n)*")).mask()
    assert words is not None
    assert (words.format, words.itemsize, len(words)) == ("I", 4, -(-width // 32))
    may = allowed(start(constraint_of(regex="(.|\n)*")))
    assert may is not None
    assert max(may) < byte_level().vocab_size


def test_every_end_token_is_allowed_where_the_output_may_end_and_only_there() -> None:
    matcher = start(constraint_of(regex="a+"))
    ends = set(control_ids())
    assert ends <= byte_level().eos_ids
    assert not (allowed(matcher) or set()) & ends
    take_all(matcher, "a")
    assert ends <= (allowed(matcher) or set())
    assert not matcher.is_done
    # Not counted: what ends the sequence has no place in the grammar.
    matcher.take(control_ids()[0])
    take_all(matcher, "a")


def test_an_output_that_cannot_be_extended_is_done() -> None:
    assert not start(constraint_of(choice=["yes", "no"])).is_done
    matcher = start(constraint_of(choice=["yes", "no"]))
    take_all(matcher, "yes")
    assert matcher.is_done
    assert allowed(matcher) == set(byte_level().eos_ids)


def test_a_copy_goes_its_own_way() -> None:
    matcher = start(constraint_of(regex="a(bc|de)*"))
    take_all(matcher, "a")
    before = allowed(matcher)
    twin = matcher.copy()
    assert allowed(twin) == before
    mask = matcher.mask()
    assert mask is not None
    kept = bytes(mask)
    take_all(twin, "b")
    assert allowed(twin) != before
    # The words that the matcher has given out are not the copy's.
    assert bytes(mask) == kept
    take_all(matcher, "d")
    assert tokens_of("e")[0] in (allowed(matcher) or set())
    assert tokens_of("c")[0] in (allowed(twin) or set())


def test_a_copy_looks_for_the_marker_by_itself() -> None:
    made = replace(constraint_of(choice=["yes"]), free_until="</think>")
    matcher = start(made)
    take_all(matcher, "so </th")
    twin = matcher.copy()
    take_all(twin, "ink>")
    assert (matcher.is_free, twin.is_free) == (True, False)


def test_a_choice_that_begins_another_leaves_both_open() -> None:
    made = constraint_of(choice=["a", "ab", "abc"])
    assert [accepts(made, text) for text in ("a", "ab", "abc", "abcd", "b")] == [True, True, True, False, False]


def test_a_token_that_does_not_fit_is_an_error_of_the_sequence_and_stays_one() -> None:
    matcher = start(constraint_of(choice=["yes"]))
    for _ in range(2):
        with pytest.raises(SequenceFailed, match="cannot be held to its structure"):
            matcher.take(tokens_of("x")[0])
    # The library would allow the end of the output now, and it would look complete.
    with pytest.raises(SequenceFailed):
        matcher.mask()
    assert not matcher.is_done


@pytest.mark.full
def test_a_grammar_that_takes_too_much_per_step_fails_its_sequence() -> None:
    ambiguous = Constraint(grammar='start: e\ne: e e | "a"', is_users=True)
    matcher = start(ambiguous)

    def write(count: int) -> None:
        for _ in range(count):
            matcher.mask()
            take_all(matcher, "a")

    with pytest.raises(SequenceFailed) as failure:
        write(600)
    # Clients send what ends with a 5xx again, which would fail again. Of the error, the server gets the text.
    told = SequenceFailed.of_choice(failure.value.message)
    assert (type(told), told.http_status, told.openai_code) == (StructureFailed, 400, "structure_failed")
    assert SequenceFailed.of_choice("The logits are not finite.").http_status == 500


def test_forced_tokens_are_what_the_tokenizer_makes_of_the_forced_text() -> None:
    made = constraint_of(json_schema=json.dumps(PERSON), jump_forward=True)
    forced = start(made).forced()
    assert byte_level().decode(forced) == '{"name": "'
    assert start(replace(made, jump_forward=False)).forced() == []


@pytest.mark.parametrize("name", VOCABULARIES)
def test_forced_tokens_can_always_be_taken(name: str) -> None:
    matcher = start(constraint_of(name, choice=["The quick brown fox jumps 日本語 🙂"], jump_forward=True), name)
    written = b""
    while not matcher.is_done:
        tokens = matcher.forced() or [min(allowed(matcher) or set())]
        for token in tokens:
            matcher.take(token)
            written += VOCABULARIES[name]().token_bytes(token)
    assert written.decode() == "The quick brown fox jumps 日本語 🙂"


@pytest.mark.parametrize("letter", ["the quick fox ", "日", "a"])
def test_forced_text_of_any_length_is_followed_piece_by_piece(letter: str) -> None:
    """A constant of 24,000 characters was tokenised again for each of its tokens."""
    matcher = start(constraint_of(choice=[letter * 1000], jump_forward=True))
    written = b""
    while not matcher.is_done:
        tokens = matcher.forced() or [min(allowed(matcher) or set())]
        assert len(tokens) <= 500
        for token in tokens:
            matcher.take(token)
            written += byte_level().token_bytes(token)
    assert written.decode() == letter * 1000


def test_forced_text_that_looks_like_a_special_token_is_text() -> None:
    """The library's own tokenisation makes the special token of it, which its grammar then refuses."""
    matcher = start(constraint_of(json_schema='{"const": "<|im_end|> hi"}', jump_forward=True))
    forced = matcher.forced()
    assert not set(forced) & byte_level().special_ids
    assert byte_level().decode(forced, skip_special=False).startswith('"<|im_end|> h')
    for token in forced:
        matcher.take(token)


def test_choices_of_one_request_do_not_see_each_other() -> None:
    prototype = compiler().prepare(constraint_of(choice=["yes", "no"]))
    one, two = prototype.start(), prototype.start()
    take_all(one, "yes")
    take_all(two, "n")
    assert (one.is_done, two.is_done) == (True, False)
    take_all(two, "o")
    assert two.is_done


def is_endless(matcher: Matcher) -> bool:
    """Whether any token of the logits may come that does not end the sequence, and no other."""
    return allowed(matcher) == set(range(byte_level().vocab_size + 3)) - byte_level().eos_ids


def test_any_token_but_an_end_may_come_before_the_marker_and_the_grammar_begins_after_it() -> None:
    """A model that ended within its reasoning gave an empty answer, with the finish reason of a complete one."""
    matcher = start(replace(constraint_of(choice=["yes"]), free_until="</think>", jump_forward=True))
    take_all(matcher, "Let me see: no. </thin")
    assert is_endless(matcher)
    assert matcher.forced() == []
    take_all(matcher, "</think>")
    assert not is_endless(matcher)
    assert byte_level().decode(matcher.forced()) == "yes"
    take_all(matcher, "yes")
    assert matcher.is_done


@pytest.mark.parametrize("marker", ["</think>", "<think>", "<|im_end|>"])
@pytest.mark.parametrize("jump_forward", [False, True])
def test_the_marker_must_come_once_the_budget_before_it_is_spent(marker: str, jump_forward: bool) -> None:
    made = replace(constraint_of(choice=["yes"]), free_until=marker, free_tokens=3, jump_forward=jump_forward)
    matcher = start(made)
    written: list[int] = []
    for token in (*tokens_of("a"), *tokens_of("b"), *tokens_of("c")):
        assert is_endless(matcher)
        assert matcher.forced() == []
        matcher.take(token)
    while byte_level().decode(written, skip_special=False) != marker:
        due = matcher.forced() if jump_forward else list(allowed(matcher) or ())[:2]
        assert jump_forward or len(due) == 1
        for token in due:
            matcher.take(token)
        written += due
    assert {byte_level().token_bytes(token)[:1] for token in allowed(matcher) or ()} == {b"y", b"\n"}
    take_all(matcher, "yes")
    assert matcher.is_done


def test_a_lazy_grammar_leaves_the_reasoning_free_to_end() -> None:
    assert start(Constraint(grammar=CALLS, lazy=True, free_until="</think>")).mask() is None


def test_a_users_stop_token_does_not_end_the_reasoning_before_a_structure() -> None:
    [stop] = tokens_of("x")
    made = replace(constraint_of(regex="x+"), free_until="</think>")
    params = SamplingParams(stop_token_ids=(stop,))
    request = Request(id=1, prompt_ids=(5,), params=params, seed=0, eos_ids=byte_level().eos_ids, constraint=made)
    sequence = Sequence(1, request, max_len=100, matcher=start(made))
    assert not is_allowed(sequence.mask, stop)
    assert is_allowed(sequence.mask, stop - 1)
    for token in tokens_of("</think>"):
        assert sequence.follow(token) is None
    assert is_allowed(sequence.mask, stop)


def test_a_panic_of_the_library_fails_its_own_sequence() -> None:
    """It is no Exception, and failed every request of the engine."""

    class Panic(BaseException):
        pass

    class Panicking:
        def __getattr__(self, name: str) -> object:
            raise Panic("index out of bounds")

    made = constraint_of(choice=["yes"], jump_forward=True)
    matcher = GrammarMatcher(cast("LLMatcher", Panicking()), compiler().vocabulary, made)
    for call in (matcher.mask, matcher.forced, lambda: matcher.take(tokens_of("y")[0]), lambda: matcher.is_done):
        with pytest.raises(SequenceFailed, match="index out of bounds"):
            call()


def test_a_marker_in_time_leaves_the_budget_behind() -> None:
    matcher = start(replace(constraint_of(choice=["yes"]), free_until="<think>", free_tokens=3))
    take_all(matcher, "a<think>yes")
    assert matcher.is_done


@given(st.text("</think>a", max_size=40))
def test_the_marker_is_found_wherever_tokens_are_cut(before: str) -> None:
    text = before.replace("</think>", "") + "</think>"
    matcher = start(replace(constraint_of(choice=["yes"]), free_until="</think>"))
    for index, byte in enumerate(text.encode()):
        assert matcher.is_free, text[:index]
        matcher.take(next(token for token in range(400) if byte_level().token_bytes(token) == bytes([byte])))
        if "</think>" in text[: index + 1]:
            break
    assert not matcher.is_free


def with_tokens(*tokens: bytes) -> GrammarCompiler:
    """A vocabulary of the bytes and these."""

    class Few:
        vocab_size = 256 + len(tokens)
        eos_ids: frozenset[int] = frozenset()
        special_ids: frozenset[int] = frozenset()

        def token_bytes(self, id: int) -> bytes:
            return bytes([id]) if id < 256 else tokens[id - 256]

        def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> list[int]:
            return list(text.encode())

    return GrammarCompiler(Few, 256 + len(tokens))


@pytest.mark.parametrize(("token", "then"), [(b">", "yes"), (b">\n\n", "yes"), (b">ye", "s")])
def test_a_marker_may_end_within_a_token(token: bytes, then: str) -> None:
    made = Constraint(grammar='start: "yes"', free_until="</think>")
    matcher = with_tokens(token).prepare(made).start()
    for each in (*b"</think", 256, *then.encode()):
        matcher.take(each)
    assert matcher.is_done


def is_allowed(mask: memoryview | None, token: int) -> bool:
    return mask is not None and bool(mask[token // 32] >> token % 32 & 1)


def test_two_line_breaks_may_come_between_the_marker_and_the_structure() -> None:
    matcher = with_tokens(b"\n\n").prepare(Constraint(grammar='start: "yes"', free_until="</think>")).start()
    for each in b"</think>":
        matcher.take(each)
    for line_break in (256, ord("\n")):
        assert is_allowed(matcher.mask(), line_break)
        matcher.take(line_break)
    assert not is_allowed(matcher.mask(), ord("\n"))
    for each in b"yes":
        matcher.take(each)
    assert matcher.is_done


def test_line_breaks_that_the_structure_describes_are_its_own() -> None:
    matcher = with_tokens().prepare(Constraint(grammar='start: "\\n\\n\\nyes"', free_until="</think>")).start()
    for each in b"</think>\n\n\n":
        matcher.take(each)
    assert not is_allowed(matcher.mask(), ord("\n"))
    for each in b"yes":
        matcher.take(each)
    assert matcher.is_done


def test_a_token_that_goes_on_wrongly_after_the_marker_is_an_error_of_the_sequence() -> None:
    matcher = with_tokens(b">no").prepare(Constraint(grammar='start: "yes"', free_until="</think>")).start()
    for each in b"</think":
        matcher.take(each)
    with pytest.raises(SequenceFailed, match="middle of a token"):
        matcher.take(256)


def test_a_model_without_an_end_token_ends_where_nothing_can_follow() -> None:
    matcher = with_tokens().prepare(Constraint(grammar='start: "ab"')).start()
    assert allowed(matcher) == {ord("a")}
    for each in b"ab":
        matcher.take(each)
    assert matcher.is_done


CALLS = """%llguidance {}
start: (call)* rest
rest: TEXT
head[lazy]: TEXT "<call>"
call: head /[0-9]+/ "</call>"
TEXT: /(.|\\n)*/
"""


def test_a_lazy_grammar_binds_only_where_the_output_could_not_end() -> None:
    matcher = start(Constraint(grammar=CALLS, lazy=True))
    end, turn_end = control_ids()
    assert {end, turn_end, *tokens_of("The fox")} <= (allowed(matcher) or set())
    take_all(matcher, "I call <call")
    # A special token in free text is passed over.
    assert byte_level().special_ids <= (allowed(matcher) or set())
    take_all(matcher, ">")
    assert allowed(matcher) is not None
    assert not (allowed(matcher) or set()) & byte_level().special_ids
    assert {byte_level().token_bytes(token)[:1] for token in allowed(matcher) or set()} <= {
        str(digit).encode() for digit in range(10)
    }
    take_all(matcher, "12</call> and more <call>3")
    assert not (allowed(matcher) or set()) & byte_level().special_ids
    take_all(matcher, "</call>")
    assert not matcher.is_done


def test_a_special_token_in_free_text_of_a_lazy_grammar_does_not_end_the_match() -> None:
    [stray] = byte_level().special_ids - byte_level().eos_ids
    matcher = start(Constraint(grammar=CALLS, lazy=True))
    take_all(matcher, "I ")
    matcher.take(stray)
    take_all(matcher, "call <call>1")
    assert not (allowed(matcher) or set()) & byte_level().special_ids


def test_constraints_that_differ_in_other_fields_are_compiled_once() -> None:
    one = constraint_of(choice=["compiled", "once"])
    shared = [
        compiler().prepare(each)._compiled for each in (one, replace(one, lazy=True), replace(one, free_until="x"))
    ]
    assert shared[0] is shared[1] is shared[2]


@pytest.mark.parametrize(
    "grammar", ["start: nothing", "", 'start: "a', '{"grammars": [{"json_schema": {"$ref": "#"}}]}']
)
def test_a_grammar_that_does_not_compile_is_refused_in_one_line(grammar: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        compiler().prepare(Constraint(grammar=grammar))
    assert refusal.value.param == "structured"
    assert "\n" not in refusal.value.message


def test_threads_may_share_a_compiler() -> None:
    made = [constraint_of(regex=f"[0-9]{{{number + 1}}}") for number in range(4)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        for turn in range(40):
            number = (seed + turn) % len(made)
            if len(random_output(made[number], seed * 100 + turn) or "") != number + 1:
                wrong.append(f"{seed}, {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
