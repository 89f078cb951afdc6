"""Turns the engine's output into events and outcomes for any dialect's writer. Knows completions; no wire format."""

from collections.abc import Iterable

from ostro.answers.events import Event
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.server.dialects.chat_turn import AnswerStream
from ostro.server.dialects.outcome import Counts, Outcome
from ostro.server.models.served import Model


class Reading:
    """Reads the one choice of a completion, in pieces or as a whole."""

    def __init__(self, answers: AnswerStream, completion: Completion, model: Model) -> None:
        self._answers = answers
        self._completion = completion
        self._tokenizer = model.service.tokenizer
        self._max_len = None if model.service.info is None else model.service.info.max_len

    def of(self, deltas: Iterable[Delta]) -> list[Event]:
        """The deltas' events. Raises SequenceFailed if the choice failed."""
        events: list[Event] = []
        for delta in deltas:
            events += self._answers.events(delta)
            if delta.finish_reason is not None:
                self._answers.finish_reason(delta.index)
        return events

    def whole(self) -> Delta:
        """The whole output as one delta."""
        [choice] = self._completion.choices
        return Delta(choice.index, choice.text, choice.finish_reason, choice.token_ids, choice.logprobs, choice.error)

    @property
    def choice(self) -> Choice:
        """The choice that it reads."""
        [choice] = self._completion.choices
        return choice

    @property
    def counts(self) -> Counts:
        """Counts so far, without reasoning tokens."""
        prompt = self._completion
        return Counts(prompt=len(prompt.prompt_ids), cached=prompt.num_cached, generated=prompt.num_generated)

    def outcome(self) -> Outcome:
        """The outcome of a choice that has ended."""
        [choice] = self._completion.choices
        length = len(self._completion.prompt_ids) + len(choice.token_ids)
        return Outcome(
            counts=Counts(
                prompt=len(self._completion.prompt_ids),
                cached=self._completion.num_cached,
                generated=len(choice.token_ids),
                reasoning=self._answers.num_reasoning(self._tokenizer) or 0,
            ),
            reason="length" if self._is_cut(choice) else "stop",
            stopped_by=choice.stopped_by,
            context_full=self._max_len is not None and length >= self._max_len,
        )

    def _is_cut(self, choice: Choice) -> bool:
        reason = self._answers.finish_reason(choice.index)
        return reason in ("length", "repetition") or self._answers.has_open_call(choice.index)
