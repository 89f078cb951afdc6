"""The leader of a mesh admits its followers, whoever else connects."""

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ostro.backends.jax import handshake
from ostro.backends.jax.handshake import Invitation, admit_followers, connect, listen, received
from ostro.errors import BadRequest, Unavailable

LONG = 600.0
"""Seconds that no test waits for."""


@contextmanager
def leader() -> Iterator[tuple[socket.socket, Invitation]]:
    listening, invitation = listen("127.0.0.1")
    with listening:
        yield listening, invitation


def stranger(invitation: Invitation) -> socket.socket:
    return socket.create_connection((invitation.host, invitation.port), timeout=60)


def test_a_follower_is_admitted_and_hears_the_leader() -> None:
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread:
        admitted = thread.submit(admit_followers, listening, invitation.key, 1)
        with connect(invitation) as follower:
            [connection] = admitted.result()
            with connection:
                connection.sendall(b"a call")
                assert received(follower, 6) == b"a call"
            assert received(follower, 1) == b""


def test_strangers_that_say_nothing_hold_up_nobody() -> None:
    """They were served one after another, each for up to a minute."""
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread, ExitStack() as open_:
        # More than are kept waiting at a time; all have connected before the follower does.
        strangers = [open_.enter_context(stranger(invitation)) for _ in range(100)]
        admitted = thread.submit(admit_followers, listening, invitation.key, 1, patience=LONG, proof_seconds=LONG)
        follower = open_.enter_context(connect(invitation))
        [connection] = admitted.result(timeout=60)
        with connection:
            connection.sendall(b"a call")
            assert received(follower, 6) == b"a call"
        # They got a challenge, and were sent away.
        assert all(len(received(each, 100)) == 32 for each in strangers)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_flood_from_one_address_does_not_displace_a_follower_from_another() -> None:
    """Of too many connections, the oldest was rejected, whoever had opened the others: a follower on a slow network was
    sent away, and the whole mesh had to start again.
    """
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread, ExitStack() as open_:
        admitted = thread.submit(admit_followers, listening, invitation.key, 1, patience=LONG, proof_seconds=LONG)
        slow = open_.enter_context(stranger(invitation))
        challenge = received(slow, 32)
        for _ in range(200):
            flood = socket.create_connection(
                (invitation.host, invitation.port), timeout=60, source_address=("127.0.0.2", 0)
            )
            # Once it has its challenge, it is one of the candidates.
            assert len(received(open_.enter_context(flood), 32)) == 32
        slow.sendall(handshake._proof(invitation.key, challenge))
        [connection] = admitted.result(timeout=60)
        connection.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\0" * 32, b"\0" * 1000])
def test_a_stranger_that_says_something_else_is_sent_away(said: bytes) -> None:
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread:
        admitted = thread.submit(admit_followers, listening, invitation.key, 1, patience=LONG, proof_seconds=LONG)
        with stranger(invitation) as guest:
            guest.sendall(said)
            assert len(received(guest, 100)) == 32
        with connect(invitation):
            admitted.result(timeout=60)[0].close()


def test_a_stranger_that_is_silent_too_long_is_sent_away_while_others_are_awaited() -> None:
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread:
        admitted = thread.submit(admit_followers, listening, invitation.key, 1, patience=LONG, proof_seconds=0.05)
        with stranger(invitation) as guest:
            assert len(received(guest, 100)) == 32
        follower: socket.socket | None = None
        while follower is None:
            # On a slow machine, followers may take longer too.
            with suppress(Unavailable):
                follower = connect(invitation)
        follower.close()
        admitted.result(timeout=60)[0].close()


def test_another_key_is_no_proof() -> None:
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread:
        admitted = thread.submit(admit_followers, listening, invitation.key, 1, patience=LONG)
        with pytest.raises(Unavailable, match="not admitted"):
            connect(Invitation(invitation.host, invitation.port, b"another"))
        with connect(invitation):
            admitted.result(timeout=60)[0].close()


def test_a_follower_whose_leader_hangs_up_without_a_word_is_not_admitted() -> None:
    """It believed to be connected, and its server never gave up."""
    with leader() as (listening, invitation), ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect, invitation)
        listening.accept()[0].close()
        with pytest.raises(Unavailable, match="not admitted"):
            connecting.result(timeout=60)


def test_a_follower_is_not_admitted_without_the_others() -> None:
    with ThreadPoolExecutor(1) as thread:
        with leader() as (listening, invitation):
            connecting = thread.submit(connect, invitation)
            with pytest.raises(Unavailable, match=r"(1 process|2 processes) of the mesh did not connect"):
                admit_followers(listening, invitation.key, 2, patience=0.2)
        with pytest.raises(Unavailable):
            connecting.result(timeout=60)


def test_a_leader_listens_on_its_bind_address_and_is_found_under_another() -> None:
    """It tried to listen on an address that only others see."""
    listening, invitation = listen("203.0.113.7", "0.0.0.0")
    with listening:
        assert (listening.getsockname()[0], invitation.host) == ("0.0.0.0", "203.0.113.7")


def test_a_leader_whose_followers_do_not_come_says_how_many() -> None:
    with (
        leader() as (listening, invitation),
        stranger(invitation),
        pytest.raises(Unavailable, match=r"3 processes of the mesh did not connect to 127\.0\.0\.1"),
    ):
        admit_followers(listening, invitation.key, 3, patience=0.05)


def test_a_leader_that_is_gone_or_never_was_is_named() -> None:
    with leader() as (_, invitation):
        pass
    with pytest.raises(Unavailable, match=f"127.0.0.1:{invitation.port}"):
        connect(invitation)
    with pytest.raises(BadRequest, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1")
