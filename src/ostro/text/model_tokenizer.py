"""Loads the tokenizer that a model's files and the settings name: for text, and for the engine's grammars."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ostro.config import EngineConfig
from ostro.errors import BadRequest, ModelNotFound
from ostro.sources.tokenizer_files import fetch_tokenizer, naming_tokenizer
from ostro.text.hf_files import ids_in
from ostro.text.tokenizer import Tokenizer
from ostro.text.tokenizer_limits import check_size
from ostro.weights import Checkpoint

_HELP = (
    "This model has no tokenizer, so a text is its token ids, such as '3 1 4'. Send token ids, ask /hrm/solve, or give "
    "--tokenizer ORG/NAME."
)


class IdTokenizer(Tokenizer):
    """Text is token ids: `3 1 4` encodes to [3, 1, 4], and back."""

    def __init__(self, vocab_size: int) -> None:
        check_size(vocab_size)
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


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint, path: Path | None = None) -> Tokenizer:
    """The model's own tokenizer, or the one that the settings name: at `path` if known, else downloaded if necessary.

    HRMs of upstream's dialect, which solve puzzles, may have none: then text is token ids.
    """
    if config.tokenizer is None:
        try:
            own = checkpoint.tokenizer_path
        except ModelNotFound:
            dialect = checkpoint.config.get("dialect") if config.hrm_dialect == "auto" else config.hrm_dialect
            vocab_size = checkpoint.config.get("vocab_size")
            if dialect != "upstream" or not isinstance(vocab_size, int):
                raise
            return IdTokenizer(vocab_size)
        return Tokenizer.load(own, chat_template=config.chat_template, eos_ids=_eos_ids(checkpoint))
    with naming_tokenizer(config.tokenizer):
        path = path or fetch_tokenizer(config.tokenizer, progress=True)
        return Tokenizer.load(path, chat_template=config.chat_template, eos_ids=_eos_ids(checkpoint))


def _eos_ids(checkpoint: Checkpoint) -> Iterator[int]:
    told = checkpoint.generation_config.get("eos_token_id")
    return ids_in(checkpoint.config.get("eos_token_id") if told is None else told)
