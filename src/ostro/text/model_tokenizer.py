"""Loads a model's tokenizer, as its files and the settings say: for text, and for the engine's grammars."""

from collections.abc import Iterator
from pathlib import Path

from ostro.config import EngineConfig
from ostro.errors import ModelNotFound
from ostro.sources.tokenizer_files import fetch_tokenizer, naming_tokenizer
from ostro.text.hf_files import ids_in
from ostro.text.id_text import IdTokenizer
from ostro.text.tokenizer import Tokenizer
from ostro.weights import Checkpoint


def load_tokenizer(config: EngineConfig, checkpoint: Checkpoint, path: Path | None = None) -> Tokenizer:
    """The model's own, or the one that the settings name: at `path` if known, otherwise downloaded if necessary.

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
