import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostro.errors import ModelNotFound
from ostro.sources.address import is_plain_path, parse_address


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("gs://my-models/models/tiny/", "tiny", "models/tiny"),
        ("gs://my-models/models/acme/tiny", "acme/tiny", "models/acme/tiny"),
        ("s3://my-models/acme/tiny", "acme/tiny", "acme/tiny"),
        ("s3://my-models/tiny", "tiny", "tiny"),
        ("s3://my-models", "my-models", ""),
        ("gs://my-models/models/tiny.gguf", "tiny", "models/tiny.gguf"),
        ("gs://my-models/acme/tiny-00001-of-00002.gguf", "acme/tiny", "acme/tiny-00001-of-00002.gguf"),
        ("gs://my-models/models/a b+c", "a b+c", "models/a b+c"),
    ],
)
def test_a_reference_names_its_model(text: str, name: str, key: str) -> None:
    reference = parse_address(text)
    assert (reference.name, reference.key) == (name, key)


@pytest.mark.parametrize(
    "text",
    [
        "gs://",
        "gs:///x",
        "gs://b",
        "gs://Bucket/x",
        "gs://my-models/../x",
        "s3://my-models/a//b",
        "s3://my-models/a\\b",
    ],
)
def test_invalid_reference_error_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ModelNotFound, match="Write gs://BUCKET/PATH or s3://BUCKET/PATH"):
        parse_address(text)


@pytest.mark.parametrize(
    ("key", "is_plain"),
    [("a" * 249, True), ("a" * 250, False), ("漢" * 83, True), ("漢" * 84, False), ("\ud800", False)],
    ids=["249", "250", "249-in-83", "252-in-84", "no-text"],
)
def test_a_name_is_as_long_as_its_bytes(key: str, is_plain: bool) -> None:
    assert is_plain_path(key) is is_plain


@given(st.text(alphabet="ab./\\\x00 \n~-", max_size=20))
@example("a/./b")
def test_no_reference_leads_out_of_its_bucket(rest: str) -> None:
    try:
        reference = parse_address(f"gs://my-models/{rest}")
    except ModelNotFound:
        return
    assert reference.key == "" or is_plain_path(reference.key)
    assert not {"..", ".", ""} & set(reference.key.split("/")) or reference.key == ""
    assert parse_address(str(reference)) == reference
