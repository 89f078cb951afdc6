"""Says whether what a server made of a conversation is right: an application that remembers what it gets, h11 as an
independent reader, and the rules that compare them. Knows no connections.
"""

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence

import h11
from http_grammar import DENIED, Conversation, Seen
from starlette.types import Receive, Scope, Send

# Where we accept what h11 refuses, by its reason.
LENIENT = re.compile(
    # Blank lines before a request, which RFC 9112 (2.2) asks servers to ignore.
    r"no request line received|illegal request line: bytearray\(b['\"](\\r|\\n)"
    # Several spaces in the request line, and protocols that look like HTTP.
    r"|illegal request line: bytearray\(b['\"][A-Z-]+ +[^ ]+ +(HTTP|RTSP|ICE)/1\.[01]['\"]"
    # Any number of leading zeros.
    r"|illegal chunk header: bytearray\(b'0{20}"
    # Which route a request takes does not depend on its host.
    r"|Missing mandatory Host: header|Found multiple Host: headers"
    # The last of several codings is.
    r"|Only Transfer-Encoding: chunked is supported"
)

_RESPONSE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
_TOLD = b"ok"


class Finding(Exception):
    pass


class Witness:
    """An application that remembers what it was sent, by the client's port, and answers with a digest of it."""

    def __init__(self, body_seconds: float = 60.0) -> None:
        self.seen: defaultdict[int, list[Seen]] = defaultdict(list)
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, body = scope["raw_path"], b""
        if path.startswith(b"/late"):
            await asyncio.sleep(0.2)
        is_denied = path.startswith(DENIED)
        if not is_denied:
            try:
                async with asyncio.timeout(self._body_seconds):
                    body = await _body(receive)
            except (TimeoutError, EOFError):
                await _respond(send, 408, [(b"connection", b"close")])
                return
        target = path + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        seen = Seen.of(scope["method"].encode(), target, scope["headers"], body)
        self.seen[scope["client"][1]].append(seen)
        await _respond(send, 401 if is_denied else 200, [(b"x-seen", digest(seen))])


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise EOFError
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-length", b"%d" % len(_TOLD)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _TOLD})


def digest(seen: Seen) -> bytes:
    return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest().encode()


def answers(data: bytes, methods: Sequence[bytes]) -> tuple[list[bytes], int | None]:
    """The digests in the responses to requests of these methods, and the status of a refusal after them."""
    digests: list[bytes] = []
    while data:
        found = _RESPONSE.match(data)
        if found is None:
            raise Finding(f"no response begins here: {data[:200]!r}")
        status, fields, data = int(found[1]), found[2], data[found.end() :]
        if status == 100:
            continue
        told = re.search(rb"x-seen: ([0-9a-f]{32})\r\n", fields)
        if told is None:
            if data.count(b"HTTP/1.1"):
                raise Finding(f"more comes after a refusal: {data[:200]!r}")
            return digests, status
        if len(digests) >= len(methods):
            raise Finding("a request is answered that the application has not got")
        if methods[len(digests)] != b"HEAD":
            data = data.removeprefix(_TOLD)
        digests.append(told[1])
    return digests, None


def reference(data: bytes) -> tuple[list[Seen], str]:
    """The requests that h11 finds, and what it says of the next: "" if there is none, or only the beginning of it."""
    connection, found = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), []
    connection.receive_data(data)
    begun, body = Seen(b"", b"", (), b""), b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                begun, body = Seen.of(event.method, event.target, list(event.headers), b""), b""
                if begun.is_denied:
                    found.append(begun)
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                if not begun.is_denied:
                    found.append(Seen(begun.method, begun.target, begun.fields, body))
                # Declines an upgrade, too: h11 waits for that.
                connection.send(h11.Response(status_code=400, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found, ""
                connection.start_next_cycle()
            else:
                return found, ""
    except h11.RemoteProtocolError as error:
        return found, str(error)


def outcome(case: Conversation, seen: list[Seen], sent: bytes, *, may_be_cut: bool = False) -> str:
    """What became of a conversation whose connection has ended: plain, refused, read or lenient. Raises Finding.

    `sent` is what the server has sent; `may_be_cut` if the last part of it may have been lost on the way.
    """
    answered, refusal = answers(sent, [each.method for each in seen])
    told = [digest(each) for each in seen]
    if seen and seen[-1].is_denied and refusal is not None and len(answered) < len(told):
        # Its body turned out to be broken before it was answered.
        told.pop()
    if answered != (told[: len(answered)] if may_be_cut else told):
        raise Finding(f"{len(seen)} requests came out, and {len(answered)} responses are not theirs")
    if seen[: len(case.expected)] != case.expected:
        raise Finding(f"{seen} came out instead of {case.expected}")
    if case.is_plain:
        if len(seen) > len(case.expected) or refusal is not None:
            raise Finding(f"{seen[len(case.expected) :]} and {refusal} came after what was sent")
        return "plain"
    return _compared(seen, *reference(case.data)) if len(seen) > len(case.expected) else "refused"


def _compared(seen: list[Seen], found: list[Seen], stopped: str) -> str:
    for ours, theirs in zip(seen, found, strict=False):
        if ours != theirs:
            raise Finding(f"we read {ours}, h11 {theirs}")
    if len(seen) <= len(found):
        return "read"
    if not LENIENT.match(stopped):
        raise Finding(f"we read {seen[len(found) :]}, h11 {stopped or 'no more'}")
    return "lenient"
