"""Models on the Hugging Face Hub: fetched into the Hub's own cache. Knows no formats beyond which files to leave.

The Hub's variables hold: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

import errno
import re
from pathlib import Path

from ostro.errors import DiskFull, DownloadFailed, ModelNotFound, OstroError

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?", re.ASCII
)
# No pickles, no code, and of the weights only what is read.
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_NOT_FILES = ["original/*", "onnx/*", "openvino/*", "consolidated*.safetensors"]


def parse_hub_id(reference: str) -> tuple[str, str | None] | None:
    """`org/name` or `org/name@revision` as (repository, revision); None for anything else."""
    match = _ID.fullmatch(reference)
    if match is None or ".." in reference or "--" in match["repo"]:
        return None
    return match["repo"], match["revision"]


def fetch(repo: str, revision: str | None, *, progress: bool) -> Path:
    """The directory of the repository's snapshot, downloaded as far as it is not in the Hub's cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    label = f"{repo}@{revision}" if revision else repo
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_FILES, ignore_patterns=_NOT_FILES))
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
