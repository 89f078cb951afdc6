"""Files of a tokenizer that was configured separately from its model, by any model reference. Downloads no weights,
unless the tokenizer is inside a GGUF file.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ostro.errors import DiskFull, DownloadFailed, ModelError, ModelNotFound
from ostro.sources.files import VOCABULARIES, is_first_gguf
from ostro.sources.hub import HubModel
from ostro.sources.model_reference import ModelReference
from ostro.sources.references import parse_model

# Early Hub repositories have no organisation, and configs still refer to tokenizers that way: gpt2.
_OLD_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@contextmanager
def naming_tokenizer(reference: str) -> Iterator[None]:
    """Attributes errors raised inside to this tokenizer."""
    try:
        yield
    except (ModelNotFound, ModelError, DownloadFailed, DiskFull) as error:
        told = f"The tokenizer {reference} cannot be used. {error.message}"
        raise type(error)(told, param="tokenizer") from error


def find_tokenizer(reference: str) -> Path | None:
    """What `fetch_tokenizer` would return, if it is on this machine and no newer version needs to be checked for."""
    found = _parse(reference).find(tokenizer_only=True)
    return None if found is None else _in_place(found)


def fetch_tokenizer(reference: str, *, progress: bool) -> Path:
    """A directory with the tokenizer's files, or a GGUF file; downloaded if it is not on this machine."""
    return _in_place(_parse(reference).fetch(progress=progress, tokenizer_only=True))


def _parse(reference: str) -> ModelReference:
    try:
        return parse_model(reference)
    except ModelNotFound:
        if _OLD_HUB_ID.fullmatch(reference) is None:
            raise
        return HubModel(reference)


def _in_place(path: Path) -> Path:
    """For a file beside the vocabulary, its directory; for a directory with only a GGUF file, that file."""
    if path.is_file() and path.suffix != ".gguf":
        return path.parent
    if not path.is_dir() or any((path / name).is_file() for name in VOCABULARIES):
        return path
    models = [file for file in path.glob("*.gguf") if is_first_gguf(file.name)]
    return models[0] if len(models) == 1 else path
