"""Models on the Hugging Face Hub, downloaded into the Hub's own cache. Knows which files to skip, but no formats.

Honours the Hub's environment variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import errno
import glob
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound, OstroError
from ostro.sources.files import (
    VOCABULARIES,
    gguf_files,
    hrm_files,
    is_first_gguf,
    is_index,
    is_model,
    missing,
    model_files,
    tokenizer_files,
    weight_format,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?"
    r"(?::(?P<file>\w[\w./-]{0,199}))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_SECONDS = 10.0
# No code, and only the weights we load: pickles only if there is nothing better.
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_PICKLES = ["pytorch_model.bin", "pytorch_model-*.bin"]
_NOT_FILES = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]
# The default for a repository with several quantisations, as in most other tools.
_USUAL_QUANTISATION = "Q4_K_M"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubModel:
    """`org/name`, `org/name@revision`, `org/name:FILE.gguf` or `org/name:Q4_K_M`."""

    repo: str
    revision: str | None = None
    file: str | None = None
    """A GGUF file in the repository, or a quantisation that matches exactly one of its files."""

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}" + ("" if self.file is None else f":{self.file}")

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes, unlike a branch or tag."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def name(self) -> str:
        return self.repo

    @property
    def label(self) -> str:
        return self.repo

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        """None for the newest version: only the Hub knows which that is."""
        return None if newest else cached(self)

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        """A pinned commit that is complete in the Hub's cache is used without asking the Hub."""
        if self.is_pinned and not newest and not tokenizer_only and (here := cached(self)) is not None:
            return here
        return fetch(self, progress=progress, tokenizer_only=tokenizer_only)

    def remote_files(self) -> "HubFiles":
        return HubFiles(self)


def parse_hub_id(reference: str) -> HubModel | None:
    """None if the text is not a Hub id."""
    match = _ID.fullmatch(reference)
    if match is None or ".." in reference or "--" in match["repo"]:
        return None
    return HubModel(match["repo"], match["revision"], match["file"])


def fetch(model: HubModel, *, progress: bool, tokenizer_only: bool = False) -> Path:
    """The directory of the repository's snapshot, or the GGUF file in it, downloading what is not in the Hub's cache.
    `tokenizer_only` skips the weights, unless the vocabulary is in a GGUF file.

    If the Hub does not answer, the last snapshot fetched is used.
    """
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    with _translated(model):
        try:
            # Asked first, with a timeout: snapshot_download would wait for this answer forever.
            info = _info(model)
        except RevisionNotFoundError:
            raise
        except (_transport_error(HfHubHTTPError), OSError) as error:
            return _fetched_last(model, error, tokenizer_only=tokenizer_only)
        names = [file.rfilename for file in info.siblings or ()]
        patterns, file = _wanted(model, names, tokenizer_only=tokenizer_only)
        return _snapshot(model, patterns) / file


def answers(model: HubModel, seconds: float) -> bool:
    """Whether the Hub answers for this repository within `seconds`."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        _info(model, timeout=seconds)
    except (_transport_error(HfHubHTTPError), OSError):
        return False
    return True


def cached(model: HubModel) -> Path | None:
    """Like `fetch`, from the Hub's cache alone; None if the model is missing or incomplete there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = _snapshot_here(model, tokenizer_only=False)
    except LocalEntryNotFoundError:
        return None
    return path if _is_whole(path) else None


def _is_whole(path: Path) -> bool:
    """Whether a snapshot, or the GGUF file in it, is complete: an interrupted download leaves files out."""
    if path.is_file():
        return not missing(gguf_files([each.name for each in path.parent.iterdir()], path.name), {})
    try:
        names = model_files([each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()])
    except ModelNotFound:
        return False
    indexes = {name: (path / name).read_bytes() for name in names if is_index(name)}
    return is_model(names) and not missing(names, indexes)


class HubFiles:
    """A repository's remote files: their sizes, and range reads."""

    def __init__(self, model: HubModel) -> None:
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

        self.name, self._model = model.repo, model
        with _translated(model):
            info = _info(model, files_metadata=True)
        self._commit = info.sha
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = _gguf_files(model, sizes) or filter_repo_objects(
            sizes, allow_patterns=_patterns(sizes), ignore_patterns=_NOT_FILES
        )
        # Keyed by base name: a GGUF file may lie in a subdirectory named after its quantisation.
        self._paths = {name.rpartition("/")[2] if name.endswith(".gguf") else name: name for name in wanted}
        self.sizes = {name: sizes[path] for name, path in self._paths.items()}

    def read(self, name: str, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        with _translated(self._model):
            url = hf_hub_url(self._model.repo, self._paths[name], revision=self._commit)
            headers = build_hf_headers() | {"range": f"bytes={start}-{end - 1}"}
            answer = get_session().get(url, headers=headers, timeout=_ANSWER_SECONDS)
            hf_raise_for_status(answer)
        if len(answer.content) != end - start:
            raise DownloadFailed(f"The Hub did not return the requested part of {name}. Try again later.")
        return answer.content


def _wanted(model: HubModel, names: Collection[str], *, tokenizer_only: bool) -> tuple[list[str], str]:
    """Patterns of the files to fetch, and the GGUF file among them, or an empty string."""
    if tokenizer_only and model.file is None and any(name in VOCABULARIES for name in names):
        return tokenizer_files(names), ""
    if ggufs := _gguf_files(model, names):
        return [glob.escape(name) for name in ggufs], ggufs[0]
    if tokenizer_only:
        raise ModelNotFound(f"{model.repo} has no tokenizer on the Hub: neither {VOCABULARIES[0]} nor a GGUF file.")
    return _patterns(names), ""


def _gguf_files(model: HubModel, names: Collection[str]) -> list[str]:
    """The files of the selected GGUF model, first shard first; empty for a safetensors or pickle model."""
    firsts = [name for name in names if name.endswith(".gguf") and is_first_gguf(name.rpartition("/")[2])]
    if model.file is None:
        if not firsts or weight_format(names) in ("safetensors", "pickle"):
            return []
        usual = [name for name in firsts if _is_quantisation(name, _USUAL_QUANTISATION)]
        chosen = firsts if len(firsts) == 1 else usual
        if len(firsts) > 1 and len(usual) == 1:
            _log.info("%s holds %d GGUF files; using %s", model.repo, len(firsts), usual[0])
    elif model.file.endswith(".gguf"):
        chosen = [name for name in firsts if name == model.file]
    else:
        chosen = [name for name in firsts if _is_quantisation(name, model.file)]
    if len(chosen) != 1:
        asked = "" if model.file is None else f", and {model.file} matches {'several' if chosen else 'none'} of them"
        raise ModelNotFound(
            f"{model.repo} holds these GGUF files: {', '.join(sorted(firsts)) or 'none'}{asked}. "
            f"Name one: {model.repo}:FILE.gguf."
        )
    directory = chosen[0].rpartition("/")[0]
    beside = [name for name in names if name.rpartition("/")[0] == directory]
    bare = gguf_files([name.rpartition("/")[2] for name in beside], chosen[0].rpartition("/")[2])
    return [f"{directory}/{name}".lstrip("/") for name in sorted(bare)]


def _patterns(names: Collection[str]) -> list[str]:
    """Patterns for a model that is a directory of files."""
    if (of_hrm := hrm_files(names)) is not None:
        return [glob.escape(name) for name in of_hrm]
    return [*_FILES, *_PICKLES] if weight_format(names) == "pickle" else _FILES


def _is_quantisation(file: str, name: str) -> bool:
    return re.search(rf"(?:^|[-._/]){re.escape(name)}(?:[-./]|$)", file, re.IGNORECASE) is not None


def _info(model: HubModel, *, files_metadata: bool = False, timeout: float | None = None) -> "ModelInfo":
    from huggingface_hub import HfApi, constants

    return HfApi().model_info(
        model.repo,
        revision=model.revision or constants.DEFAULT_REVISION,
        files_metadata=files_metadata,
        timeout=_ANSWER_SECONDS if timeout is None else timeout,
    )


def _snapshot(model: HubModel, patterns: list[str], *, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=_NOT_FILES,
            local_files_only=local_files_only,
        )
    )


def _snapshot_here(model: HubModel, *, tokenizer_only: bool) -> Path:
    """What `fetch` would return, from the Hub's cache. LocalEntryNotFoundError if it is incomplete there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    # A pattern that matches no file: any cached snapshot of the repository will do.
    snapshot = _snapshot(model, ["-"], local_files_only=True)
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
    try:
        patterns, file = _wanted(model, names, tokenizer_only=tokenizer_only)
    except ModelNotFound as error:
        raise LocalEntryNotFoundError(error.message) from error
    return _snapshot(model, patterns, local_files_only=True) / file


def _fetched_last(model: HubModel, reason: Exception, *, tokenizer_only: bool) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = _snapshot_here(model, tokenizer_only=tokenizer_only)
    except LocalEntryNotFoundError:
        # The Hub's own answer is more useful than "not in the cache".
        if isinstance(reason, HfHubHTTPError):
            raise reason from None
        raise
    _log.warning("The Hub did not return %s (%s); using the copy in its cache.", model, type(reason).__name__)
    return path


@contextmanager
def _translated(model: HubModel) -> Iterator[None]:
    """Translates the Hub client's errors into ours."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    repo = model.repo
    try:
        yield
    except OstroError:
        raise
    except GatedRepoError as error:
        raise DownloadFailed(
            f"The Hub gives {repo} only to those who accepted its terms. Accept them there, then set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"The Hub's repository {repo} has no revision {model.revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The Hub has no repository {repo}, or it is private. Check the name; for a private one set HF_TOKEN."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise DownloadFailed(f"The Hub answered with status {status} for {model}. Try again later.") from error
    except _transport_error(HfHubHTTPError) as error:
        raise DownloadFailed(
            f"The connection to the Hub broke off while {model} was fetched ({type(error).__name__}). "
            "Start again: what has arrived is kept."
        ) from error
    except OSError as error:
        raise _file_error(error, model, Path(constants.HF_HUB_CACHE)) from error


def _transport_error(status_error: type[Exception]) -> type[Exception]:
    """The connection error of the Hub client's HTTP library: the base class of its status errors."""
    bases = (base for base in status_error.__mro__ if base.__name__ in ("HTTPError", "RequestException"))
    return next(bases, ConnectionError)


def _file_error(error: OSError, model: HubModel, cache: Path) -> OstroError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"No room for {model} in {cache}. Free some, or set HF_HOME to a directory on another disk.")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return DownloadFailed(f"Cannot write to {cache}. Set HF_HOME to a directory you can write.")
    return DownloadFailed(
        f"The Hub could not be reached for {model}, and it is not complete in the local cache. "
        "Check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), or give the path of a local model."
    )
