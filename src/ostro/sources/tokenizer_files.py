"""Where a tokenizer's files are that was named apart from its model, by any model reference. Fetches no weights, unless
a GGUF file holds the tokenizer.
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

# Models had no organisation in the Hub's first years, and configurations still name tokenizers so: gpt2.
_OLD_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@contextmanager
def naming_tokenizer(reference: str) -> Iterator[None]:
    """What is wrong with a model's files within is said of this tokenizer."""
    try:
        yield
    except (ModelNotFound, ModelError, DownloadFailed, DiskFull) as error:
        told = f"The tokenizer {reference} cannot be used. {error.message}"
        raise type(error)(told, param="tokenizer") from error


def find_tokenizer(reference: str) -> Path | None:
    """What `fetch_tokenizer` gives, if that is on this machine and nobody need be asked for something newer."""
    found = _parse(reference).find(tokenizer_only=True)
    return None if found is None else _in_place(found)


def fetch_tokenizer(reference: str, *, progress: bool) -> Path:
    """A directory with the tokenizer's files, or a GGUF file, downloaded as far as it is not on this machine."""
    return _in_place(_parse(reference).fetch(progress=progress, tokenizer_only=True))


def _parse(reference: str) -> ModelReference:
    try:
        return parse_model(reference)
    except ModelNotFound:
        if _OLD_HUB_ID.fullmatch(reference) is None:
            raise
        return HubModel(reference)


def _in_place(path: Path) -> Path:
    """Of a file beside the vocabulary its directory; of a directory that has only a GGUF file that."""
    if path.is_file() and path.suffix != ".gguf":
        return path.parent
    if not path.is_dir() or any((path / name).is_file() for name in VOCABULARIES):
        return path
    models = [file for file in path.glob("*.gguf") if is_first_gguf(file.name)]
    return models[0] if len(models) == 1 else path
