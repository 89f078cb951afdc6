"""Models on the Hugging Face Hub: fetched into the Hub's own cache. Knows no formats beyond which files to leave.

The Hub's variables hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound, OstroError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ANSWER_SECONDS = 10.0
# No pickles, no code, and of the weights only what is read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_NOT_FILES = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]

_log = logging.getLogger(__name__)


def parse_hub_id(reference: str) -> tuple[str, str | None] | None:
    """`org/name` or `org/name@revision` as (repository, revision); None for anything else."""
    match = _ID.fullmatch(reference)
    if match is None or ".." in reference or "--" in match["repo"]:
        return None
    return match["repo"], match["revision"]


def is_commit(revision: str | None) -> bool:
    """Whether it names one state of a repository for good, as branches and tags do not."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def fetch(repo: str, revision: str | None, *, progress: bool) -> Path:
    """The directory of the repository's snapshot, downloaded as far as it is not in the Hub's cache.

    If the Hub does not answer, it is the snapshot that was fetched last.
    """
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    with _translated(repo, revision):
        try:
            # Asked first, as what fetches a snapshot would wait for this answer for ever.
            _info(repo, revision)
        except RevisionNotFoundError:
            raise
        except (_transport_error(HfHubHTTPError), OSError) as error:
            return _fetched_last(repo, revision, error)
        return _snapshot(repo, revision)


def cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot that was fetched last, without a word to the Hub; None if there is none, or only a part is known."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(repo, revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


class HubFiles:
    """A repository's files where they are: how large each is, and any part of one."""

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

        self.name, self._revision = repo, revision
        with _translated(repo, revision):
            info = _info(repo, revision, files_metadata=True)
        self._commit = info.sha
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = filter_repo_objects(sizes, allow_patterns=_FILES, ignore_patterns=_NOT_FILES)
        self.sizes = {name: sizes[name] for name in wanted}

    def read(self, name: str, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        with _translated(self.name, self._revision):
            url = hf_hub_url(self.name, name, revision=self._commit)
            headers = build_hf_headers() | {"range": f"bytes={start}-{end - 1}"}
            answer = get_session().get(url, headers=headers, timeout=_ANSWER_SECONDS)
            hf_raise_for_status(answer)
        if len(answer.content) != end - start:
            raise DownloadFailed(f"The Hub did not give the part of {name} that was asked for. Try again later.")
        return answer.content


def _info(repo: str, revision: str | None, *, files_metadata: bool = False) -> "ModelInfo":
    from huggingface_hub import HfApi, constants

    revision = revision or constants.DEFAULT_REVISION
    return HfApi().model_info(repo, revision=revision, files_metadata=files_metadata, timeout=_ANSWER_SECONDS)


def _snapshot(repo: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_FILES,
            ignore_patterns=_NOT_FILES,
            local_files_only=local_files_only,
        )
    )


def _fetched_last(repo: str, revision: str | None, reason: Exception) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = _snapshot(repo, revision, local_files_only=True)
    except LocalEntryNotFoundError:
        # An answer of the Hub says more than that nothing is here.
        if isinstance(reason, HfHubHTTPError):
            raise reason from None
        raise
    _log.warning("The Hub did not give %s (%s); the copy in its cache is used.", repo, type(reason).__name__)
    return path


@contextmanager
def _translated(repo: str, revision: str | None) -> Iterator[None]:
    """The Hub's errors as ours."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    label = f"{repo}@{revision}" if revision else repo
    try:
        yield
    except GatedRepoError as error:
        raise DownloadFailed(
            f"The Hub gives {repo} only to those who accepted its terms. Accept them there, then set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"The Hub's repository {repo} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The Hub has no model {repo}, or it is private. Check the name; for a private one set HF_TOKEN."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise DownloadFailed(f"The Hub answered with status {status} for {label}. Try again later.") from error
    except _transport_error(HfHubHTTPError) as error:
        raise DownloadFailed(
            f"The connection to the Hub broke off while {label} was fetched ({type(error).__name__}). "
            "Start again: what has arrived is kept."
        ) from error
    except OSError as error:
        raise _file_error(error, label, Path(constants.HF_HUB_CACHE)) from error


def _transport_error(status_error: type[Exception]) -> type[Exception]:
    """What the Hub's client raises when a connection breaks: the base, in its HTTP library, of its status errors."""
    bases = (base for base in status_error.__mro__ if base.__name__ in ("HTTPError", "RequestException"))
    return next(bases, ConnectionError)


def _file_error(error: OSError, label: str, cache: Path) -> OstroError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"No room for {label} in {cache}. Free some, or set HF_HOME to a directory on another disk.")
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return DownloadFailed(f"Cannot write to {cache}. Set HF_HOME to a directory you can write.")
    return DownloadFailed(
        f"The Hub could not be reached for {label}, and it is not whole in the local cache. "
        "Check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), or give the path of a local model."
    )
