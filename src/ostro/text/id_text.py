"""The tokenizer of a model that has none: text is decimal token ids, separated by spaces."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ostro.errors import BadRequest
from ostro.text.tokenizer import Tokenizer

_HELP = (
    "This model has no tokenizer, so a text is its token ids, such as '3 1 4'. Send token ids, ask /hrm/solve, or give "
    "--tokenizer-path."
)


class IdTokenizer(Tokenizer):
    """`3 1 4` is [3, 1, 4], and back."""

    def __init__(self, vocab_size: int) -> None:
        core = tokenizers.Tokenizer(models.WordLevel({str(id): id for id in range(vocab_size)}, unk_token=""))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        super().__init__(core)

    def encode_batch(
        self, texts: Sequence[str], *, add_special: bool = True, allow_special: bool = True
    ) -> list[list[int]]:
        """Raises BadRequest for a text that holds anything but this model's ids."""
        for text in texts:
            for word in text.split():
                if self._core.token_to_id(word) is None:
                    raise BadRequest(f"{word[:32]!r} is not a token id from 0 to {self.vocab_size - 1}. {_HELP}")
        return super().encode_batch(texts, add_special=add_special)
