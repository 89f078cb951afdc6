"""Streams one choice's text: detokenises its tokens as they arrive and ends it at stop strings. Knows no engine."""

from collections.abc import Sequence

from ostro.sampling_params import SamplingParams
from ostro.text.detokenizer import Detokenizer
from ostro.text.stops import StopMatcher
from ostro.text.tokenizer import Tokenizer


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens whose text is kept even if the params skip special tokens."""
        skip_special = params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special=skip_special, shown_ids=shown_ids)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_in_output)
        self._params = params
        self.num_tokens = 0
        """Tokens that the text is made of, up to the stop string's last."""
        self.stopped_by: str | None = None
        """The stop string that ended the text: later tokens of the sequence are ignored."""

    def push(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> str:
        """The text that these tokens complete. With `last_is_stop` the last one ended the sequence and is not text."""
        if last_is_stop and not self._params.include_stop_in_output:
            token_ids = token_ids[:-1]
        if not self._params.stop:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            text += self._match(self._detokenizer.push((token_id,)))
            if self.stopped_by is not None:
                break
        return text

    def flush(self) -> str:
        """The text that was held back. Call it once no more tokens will come."""
        if self.stopped_by is not None:
            return ""
        text = self._match(self._detokenizer.flush())
        return text if self.stopped_by is not None else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        if not self._params.stop or self.num_tokens < self._params.min_tokens:
            return text
        safe, self.stopped_by = self._matcher.push(text)
        return safe
