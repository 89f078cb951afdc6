"""Writes HTTP/1.1 conversations as clients write them, and as they should not. Knows no server.

A conversation is what one client sends over one connection: a few requests, one after the other, in pieces. Plain ones
follow the grammar of RFC 9112, with all the freedom that it gives. An odd one departs from it in some way that has
fooled servers before, or has bytes changed at random.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

Field = tuple[bytes, bytes]

METHODS = (b"GET", b"POST", b"POST", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS")
TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PATH = b"-._~!$&'()*+,;=:@/%20%C3%A9%2F0123456789abcdefghijklmnopqrstuvwxyz"
VALUE = bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100)) + b"  \t"
ENDPOINTS = (b"/read", b"/read", b"/read", b"/late", b"/deny")
"""Read the body and answer; do so after a while; answer at once and leave the body."""
DENIED = b"/deny"
OFFERS = (b"h2c", b"websocket", b"TLS/1.0", b"foo/2, bar")
EXTENSIONS = (b"", b"", b"", b";a", b";a=b", b';name="a; b"', b";a=1;b=2;c")
# What a body looks like that wants to be a request.
DECOYS = (b"GET /read/decoy HTTP/1.1\r\nhost: x\r\n\r\n", b"0\r\n\r\n", b"\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as an application gets it. Of its body only what was asked for."""

    method: bytes
    target: bytes
    fields: tuple[Field, ...]
    """Without those that say where a body ends, and offers to upgrade."""
    body: bytes

    @classmethod
    def of(cls, method: bytes, target: bytes, fields: list[Field], body: bytes) -> "Seen":
        target = re.sub(rb"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*", b"", target).partition(b"#")[0].removesuffix(b"?")
        # Readers differ in what they make of a folded line; the rest of the value must be the same.
        kept = tuple((name.lower(), re.sub(rb"[ \t]+", b"", value)) for name, value in fields)
        kept = tuple(pair for pair in kept if pair[0] not in (b"content-length", b"transfer-encoding", b"upgrade"))
        return cls(method, target, kept, b"" if target.startswith(DENIED) else body)

    @property
    def is_denied(self) -> bool:
        """Whether it is answered before its body has come."""
        return self.target.startswith(DENIED)


@dataclass(slots=True)
class Chunk:
    size: bytes
    extension: bytes
    data: bytes
    end: bytes = b"\r\n"

    def written(self) -> bytes:
        return self.size + self.extension + b"\r\n" + self.data + self.end


@dataclass(slots=True)
class Message:
    """One request, in parts that can be changed."""

    method: bytes
    target: bytes
    version: bytes
    fields: list[Field]
    body: bytes = b""
    chunks: list[Chunk] | None = None
    trailers: list[Field] = field(default_factory=list)
    before: bytes = b""
    line_end: bytes = b"\r\n"
    colon: bytes = b":"

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after it."""
        return self.version == b"HTTP/1.0" or any(
            name.lower() == b"connection" and b"close" in value.lower() for name, value in self.fields
        )

    def seen(self) -> Seen:
        body = self.body if self.chunks is None else b"".join(chunk.data for chunk in self.chunks)
        return Seen.of(self.method, self.target, self.fields, body)

    def written(self) -> bytes:
        lines = [self.method + b" " + self.target + b" " + self.version]
        lines += [name + self.colon + value for name, value in self.fields]
        head = self.before + self.line_end.join([*lines, b"", b""])
        if self.chunks is None:
            return head + self.body
        chunks = b"".join(chunk.written() for chunk in self.chunks)
        trailers = b"".join(name + b": " + value + b"\r\n" for name, value in self.trailers)
        return head + chunks + trailers + b"\r\n"


@dataclass(frozen=True, slots=True)
class Conversation:
    pieces: list[bytes]
    expected: list[Seen]
    """The requests before anything odd, each of which has to be answered."""
    num_messages: int
    is_plain: bool
    pause: float | None
    """Seconds between the pieces, if others may run in between."""
    leaves: bool
    """Whether the client leaves once it has sent them."""

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


def conversation(random: Random) -> Conversation:
    messages = [plain(random) for _ in range(random.choice((1, 1, 2, 2, 3, 4, 6)))]
    written: list[bytes] = []
    expected, is_plain = [], True
    for message in messages:
        is_expected = is_plain and not any(each.is_last for each in messages[: len(written)])
        if random.random() < 0.3:
            is_plain = False
            written.append(odd(message, random))
            continue
        if is_expected:
            expected.append(message.seen())
        written.append(message.written())
    if random.random() < 0.05:
        # Its end never comes.
        last = random.randrange(len(written))
        written[last:] = [written[last][: random.randrange(len(written[last]) + 1)]]
        expected, is_plain = expected[:last], False
    parts = pieces(b"".join(written), [len(each) for each in written], random)
    return Conversation(
        parts,
        expected,
        num_messages=len(messages),
        is_plain=is_plain,
        # No client is so slow that it would be dropped. Pauses between many pieces take long here, too.
        pause=random.choice((None, None, 0.0, 0.0, 0.01, 2 / len(parts))) if random.random() < 8 / len(parts) else None,
        leaves=random.random() < 0.05,
    )


def pieces(data: bytes, lengths: list[int], random: Random) -> list[bytes]:
    """The bytes as they might arrive: together, one by one, request by request, or cut anywhere."""
    match random.randrange(6):
        case 0 | 1:
            return [data]
        case 2 if len(data) < 1000:
            cuts = set(range(len(data)))
        case 3:
            cuts = {sum(lengths[:number]) for number in range(len(lengths))}
        case 4:
            ends = [found.end() for found in re.finditer(rb"\r\n?|\n", data)]
            cuts = {end - random.randrange(3) for end in random.sample(ends, min(len(ends), 8))}
        case _:
            cuts = {random.randrange(len(data) + 1) for _ in range(random.randint(1, 6))}
    marks = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    return [data[begin:end] for begin, end in pairwise(marks)]


# --- plain ------------------------------------------------------------------------------------------------------------


def plain(random: Random) -> Message:
    version = b"HTTP/1.0" if random.random() < 0.04 else b"HTTP/1.1"
    message = Message(random.choice(METHODS), target(random), version, [(b"Host", b" localhost")])
    message.fields += [plain_field(random) for _ in range(random.choice((0, 0, 1, 2, 5)))]
    frame(message, random)
    if random.random() < 0.04:
        message.fields.append((b"Connection", random.choice((b"close", b" Close ", b"keep-alive, close"))))
    elif random.random() < 0.15:
        message.fields += [(b"Connection", b" Upgrade, x"), (b"Upgrade", b" " + random.choice(OFFERS))]
    elif random.random() < 0.05:
        message.fields.append((b"Connection", b" upgrade"))
    if version == b"HTTP/1.1" and random.random() < 0.04:
        message.fields.append((b"Expect", b" 100-continue"))
    if random.random() < 0.5:
        random.shuffle(message.fields)
    return message


def target(random: Random) -> bytes:
    path = random.choice(ENDPOINTS)
    if random.random() < 0.5:
        path += b"/" + some(PATH, random, 30).replace(b"%", b"%41")
    if random.random() < 0.2:
        path += b"?" + some(TOKEN.replace(b"#", b"").replace(b"%", b""), random, 20)
    return b"http://a.example:80" + path if random.random() < 0.05 else path


def plain_field(random: Random) -> Field:
    name = b"x-" + some(TOKEN, random, 20)
    value = some(VALUE, random, random.choice((0, 5, 40))).strip()
    return name, random.choice((b"", b" ", b" \t")) + value + random.choice((b"", b"", b" \t "))


def frame(message: Message, random: Random) -> None:
    """Gives it a body, of announced length or in chunks, or none."""
    body = random.randbytes(random.choice((0, 1, 30, 300))) + random.choice(DECOYS)
    match random.randrange(4):
        case 0 | 1:
            message.body = body
            message.fields.append((random.choice((b"Content-Length", b"content-length")), b" %d" % len(body)))
        case 2 if message.version == b"HTTP/1.1":
            message.fields.append((b"Transfer-Encoding", random.choice((b" chunked", b"chunked", b" Chunked"))))
            message.chunks = chunked(body, random)
            if random.random() < 0.3:
                message.trailers = [plain_field(random) for _ in range(random.randint(1, 3))]


def chunked(body: bytes, random: Random) -> list[Chunk]:
    chunks = []
    while body:
        size = random.choice((1, 2, 16, 100, len(body)))
        data, body = body[:size], body[size:]
        chunks.append(Chunk(random.choice((b"%x", b"%X", b"000%x")) % len(data), random.choice(EXTENSIONS), data))
    return [*chunks, Chunk(random.choice((b"0", b"0", b"000")), random.choice(EXTENSIONS), b"", b"")]


def some(alphabet: bytes, random: Random, most: int) -> bytes:
    return bytes(random.choices(alphabet, k=random.randint(0, most)))


# --- odd --------------------------------------------------------------------------------------------------------------


def odd(message: Message, random: Random) -> bytes:
    if random.random() < 0.3:
        return damaged(message.written(), random)
    for _ in range(random.choice((1, 1, 2, 3))):
        random.choice(ODDITIES)(message, random)
    data = message.written()
    return damaged(data, random) if random.random() < 0.2 else data


def damaged(data: bytes, random: Random) -> bytes:
    """With bytes changed, left out, doubled or put in."""
    for _ in range(random.choice((1, 1, 2, 8))):
        at, size = random.randrange(len(data) + 1), random.choice((1, 1, 2, 10))
        part = data[at : at + size]
        other = random.choice((b"", part + part, random.randbytes(size), random.choice(SPECIAL), part[::-1]))
        data = data[:at] + other + data[at + size :]
    return data


SPECIAL = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b";",
    b",",
    b"\x7f",
    b"\xff",
    b"\x0b",
    b"-",
    b"0",
)
LENGTHS = (
    *(b"", b" ", b"-1", b"+5", b"0x5", b"5,5", b"5, 6", b"5 5", b"5;", b"1e1", b"00005", b"5\x0b", b"\xb2", b"5_0"),
    *(b"%d" % (2**31), b"%d" % (2**63), b"%d" % (2**64 - 1), b"%d" % (2**64 + 5), b"9" * 40),
)
CODINGS = (
    *(b"", b"identity", b"gzip", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked", b"xchunked", b"chunkedx"),
    *(b"chunked;a=b", b"\x0bchunked", b"chunked\x0b", b"chunked,", b",chunked", b'"chunked"', b"chun\tked"),
)
SIZES = (
    b"",
    b"-1",
    b"+1",
    b"0x1",
    b"g",
    b"1 ",
    b" 1",
    b"1\t",
    b"1\x00",
    b"f" * 15,
    b"f" * 16,
    b"1" + b"0" * 16,
    b"0" * 40,
)
BAD_EXTENSIONS = (b"; a=b", b";", b";;", b";=", b';a="', b";a b", b";\x00", b";\n", b";\xff", b";" + b"a" * 70_000)
VERSIONS = (
    *(b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/3.0", b"HTTP/11", b"HTTP/1.10", b"http/1.1", b"HTTP/1.1 ", b""),
    *(b"HTTP /1.1", b"HTTP/ 1.1", b"ICE/1.0", b"RTSP/1.0", b"HTTP/-1.1"),
)
VERBS = (
    b"get",
    b"BREW",
    b"PRI",
    b"CONNECT",
    b"SOURCE",
    b"DESCRIBE",
    b"M-SEARCH",
    b"QUERY",
    b"G ET",
    b"",
    b"\x16\x03\x01",
)
TARGETS = (
    *(b"", b"*", b"a:1", b"read", b"/a b", b"/\xc3\xa9", b"/read#x", b"//read", b"http://", b"http:///read", b"?a"),
    *(b"/\0", b"/\x7f", b"/%zz", b"/read\tx", b"http://a b/", b"http://[::1/", b"/deny?x#y", b"/read?" + b"q" * 70_000),
)
NAMES = (b"", b" x", b"x ", b"x y", b"x\0", b"\xff", b"(x)", b"x\n", b"content-length ", b"\tx")
VALUES = (
    b"a\0b",
    b"a\x01b",
    b"a\x7fb",
    b"a\rb",
    b"a\nb",
    b"a\r\n b",
    b"a\r\n\tb\r\n c",
    b"\r\n a",
    b"a\r\n",
    b"v" * 70_000,
)
TRAILERS: tuple[Field, ...] = (
    *((b"Content-Length", b"5"), (b"Transfer-Encoding", b"chunked"), (b"Connection", b"close"), (b"Host", b"y")),
    *((b"Upgrade", b"h2c"), (b"Connection", b"upgrade"), (b"Expect", b"100-continue"), (b"x", b"a\r\n b"), (b"", b"")),
)
BEGINNINGS = (
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n" * 40_000,
    ),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n",
        b"GET /read\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ),
)


def without(message: Message, *names: bytes) -> list[Field]:
    return [each for each in message.fields if each[0].lower() not in names]


def unframed(message: Message, random: Random) -> None:
    """Its body is the beginning of the next request."""
    message.fields = without(message, b"content-length", b"transfer-encoding")


def strange_length(message: Message, random: Random) -> None:
    if random.random() < 0.5:
        unframed(message, random)
    message.fields.append((b"Content-Length", b" " + random.choice(LENGTHS)))


def wrong_length(message: Message, random: Random) -> None:
    """Too much by a little or a lot, or too little: of what follows, or of the body, something is left."""
    unframed(message, random)
    wrong = max(0, len(message.body) + random.choice((1, -1, 2, -2, 20, 1000)))
    message.fields.append((b"Content-Length", b" %d" % wrong))


def another_length(message: Message, random: Random) -> None:
    """One that agrees with the body, or nearly."""
    message.fields.insert(0, (b"content-length", b" %d" % (len(message.body) + random.choice((0, 0, 1, -1)))))


def strange_coding(message: Message, random: Random) -> None:
    if random.random() < 0.5:
        unframed(message, random)
    message.fields.insert(random.randint(0, len(message.fields)), (b"Transfer-Encoding", b" " + random.choice(CODINGS)))


def another_coding(message: Message, random: Random) -> None:
    message.fields.append((b"Transfer-Encoding", b" chunked"))


def strange_chunk(message: Message, random: Random) -> None:
    if message.chunks:
        chunk = random.choice(message.chunks)
        match random.randrange(4):
            case 0:
                chunk.size = random.choice(SIZES)
            case 1:
                chunk.extension = random.choice(BAD_EXTENSIONS)
            case 2:
                chunk.end = random.choice((b"", b"\n", b"\r", b" \r\n", b"\r\n\r\n"))
            case _:
                message.chunks.remove(chunk)


def strange_trailer(message: Message, random: Random) -> None:
    message.trailers += random.choices(TRAILERS, k=random.randint(1, 3))


def many_trailers(message: Message, random: Random) -> None:
    if random.random() < 0.02:
        message.trailers += [(b"x", b"y")] * 80_000


def strange_name(message: Message, random: Random) -> None:
    message.fields.insert(random.randint(0, len(message.fields)), (random.choice(NAMES), b" 5"))


def strange_value(message: Message, random: Random) -> None:
    name = random.choice((b"x", b"x", b"Content-Length", b"Connection", b"Transfer-Encoding"))
    message.fields.append((name, random.choice((b"", b" ")) + random.choice(VALUES)))


def folded(message: Message, random: Random) -> None:
    at = random.randrange(len(message.fields)) if message.fields else 0
    for name, value in message.fields[at : at + 1]:
        cut = random.randint(0, len(value))
        fold = random.choice((b"\r\n ", b"\r\n\t", b"\r\n \r\n ", b"\n "))
        message.fields[at] = name, value[:cut] + fold + value[cut:]


def many_fields(message: Message, random: Random) -> None:
    if random.random() < 0.05:
        message.fields += [(b"a", b"")] * 3000


def strange_version(message: Message, random: Random) -> None:
    message.version = random.choice(VERSIONS)


def strange_method(message: Message, random: Random) -> None:
    message.method = random.choice(VERBS)


def strange_target(message: Message, random: Random) -> None:
    message.target = random.choice(TARGETS)


def strange_beginning(message: Message, random: Random) -> None:
    message.before = random.choice(BEGINNINGS)


def strange_line_end(message: Message, random: Random) -> None:
    message.line_end = random.choice((b"\n", b"\r", b"\r\r\n", b"\n\r", b" \r\n", b"\r\n "))


def strange_colon(message: Message, random: Random) -> None:
    message.colon = random.choice((b" :", b"\t:", b"::", b"", b" ", b"=", b":\0"))


def no_host(message: Message, random: Random) -> None:
    message.fields = without(message, b"host")


def two_hosts(message: Message, random: Random) -> None:
    message.fields.append((b"host", b" y"))


def strange_offer(message: Message, random: Random) -> None:
    message.fields += [
        (b"upgrade", b" h2c"),
        (b"connection", random.choice((b" upgrade", b"Upgrade,close", b"upgrad"))),
    ]


def nonsense(message: Message, random: Random) -> None:
    message.before = random.randbytes(random.randint(1, 60))


ODDITIES: tuple[Callable[[Message, Random], None], ...] = (
    *(strange_length, wrong_length, another_length, strange_coding, another_coding, strange_chunk, strange_chunk),
    *(
        unframed,
        strange_trailer,
        many_trailers,
        strange_name,
        strange_value,
        folded,
        many_fields,
        strange_version,
        strange_method,
        strange_target,
    ),
    *(strange_beginning, strange_line_end, strange_colon, no_host, two_hosts, strange_offer, nonsense),
)
