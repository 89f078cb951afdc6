from sync_client import SOURCE, TARGET, sync_client


def test_the_blocking_client_is_generated_from_the_asynchronous_one() -> None:
    """After a change to async_client.py: python tools/sync_client.py."""
    assert TARGET.read_text(encoding="utf-8") == sync_client(SOURCE.read_text(encoding="utf-8"))
