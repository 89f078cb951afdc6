"""Settings and credentials of the stores' clients: what is wrong with them is said, and never guessed around."""

from pathlib import Path

import pytest

from ostro.errors import DownloadFailed
from ostro.sources import gcs, s3
from ostro.sources.fetch import fetch_model
from ostro.sources.models import list_models

NOWHERE = ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NOWHERE, "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "OSTRO_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_without_credentials_stores_are_asked_anonymously() -> None:
    from botocore import UNSIGNED  # type: ignore[import-untyped]
    from google.auth.credentials import AnonymousCredentials

    assert isinstance(gcs._client()._credentials, AnonymousCredentials)
    assert s3._client().meta.config.signature_version is UNSIGNED


@pytest.mark.parametrize("content", [None, "{", "{}", "a directory"])
def test_named_credentials_that_do_not_work_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """The bucket was asked without any, and then called forbidden; a directory was called a cache of no use."""
    path = tmp_path / "key.json"
    if content == "a directory":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    with pytest.raises(DownloadFailed, match=r"do not work .* Check GOOGLE_APPLICATION_CREDENTIALS"):
        fetch_model("gs://bucket/model", progress=False)
    with pytest.raises(DownloadFailed, match=r"do not work .* Check GOOGLE_APPLICATION_CREDENTIALS"):
        list_models("gs://bucket/")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AWS_PROFILE", "nosuch", r"\(nosuch\) could not be found"),
        ("AWS_ENDPOINT_URL", "host:9000", "Invalid endpoint"),
    ],
)
def test_settings_of_s3_that_do_not_work_are_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(DownloadFailed, match=rf"The settings for S3 do not work \(.*{reason}.* Check AWS_PROFILE"):
        fetch_model("s3://bucket/model", progress=False)
