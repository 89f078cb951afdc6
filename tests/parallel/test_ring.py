"""The ring between ranks: all messages arrive whole and in order, and nothing is overwritten before it is read."""

import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostro.backends.ranks.ring import RingClosed, RingReader, RingWriter


class Group:
    """A writer and readers, each with its end of a socket."""

    def __init__(self, readers: int, capacity: int) -> None:
        pairs = [socket.socketpair() for _ in range(readers)]
        self.sockets = [each for pair in pairs for each in pair]
        self.writer = RingWriter(capacity)
        self.writer.connect([ours for ours, _ in pairs])
        self.readers = [RingReader(self.writer.file, theirs) for _, theirs in pairs]

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        self.writer.free()


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 5000), max_size=60), readers=st.integers(1, 3))
def test_messages_arrive_whole_and_in_order(sizes: list[int], readers: int) -> None:
    messages = [os.urandom(size) for size in sizes]
    group = Group(readers, capacity=4096)
    found: list[list[bytes]] = [[] for _ in range(readers)]

    def read(index: int) -> None:
        reader = group.readers[index]
        for _ in messages:
            found[index].append(reader.receive())
            if (position := reader.due()) is not None:
                group.writer.acknowledge(index, position)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        group.writer.send(message)
    for thread in threads:
        thread.join()
    group.close()
    assert found == [messages] * readers


def test_a_writer_waits_for_the_slowest_reader() -> None:
    group = Group(2, capacity=4096)
    messages = [bytes([number]) * 1000 for number in range(12)]

    def send() -> None:
        for message in messages:
            group.writer.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    # The first reads everything it can get; the second has read nothing: four messages fit.
    for message in messages[:4]:
        assert group.readers[0].receive() == message
    group.writer.acknowledge(0, 4000)
    for message in messages:
        reader = group.readers[1]
        assert reader.receive() == message
        if (position := reader.due()) is not None:
            group.writer.acknowledge(1, position)
            group.writer.acknowledge(0, position)
    sender.join()
    group.close()


def test_a_writer_that_waits_for_room_learns_of_the_end() -> None:
    group = Group(1, capacity=4096)
    errors: list[Exception] = []

    def send() -> None:
        try:
            while True:
                group.writer.send(bytes(1000))
        except RingClosed as error:
            errors.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(4):
        group.readers[0].receive()
    group.writer.close()
    sender.join()
    group.close()
    assert len(errors) == 1


def test_a_reader_learns_of_the_writers_end() -> None:
    group = Group(1, capacity=4096)
    group.writer.send(b"last")
    group.sockets[0].close()
    assert group.readers[0].receive() == b"last"
    with pytest.raises(RingClosed):
        group.readers[0].receive()
    group.close()
