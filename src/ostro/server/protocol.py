"""HTTP's first bytes: a request's head arrives within bounds of size and time. Knows uvicorn; knows no routes.

uvicorn bounds neither: a header could grow until memory ends, and a head that never ends would hold its connection.
"""

from asyncio import TimerHandle, Transport
from http import HTTPStatus
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostro.errors import BadRequest
from ostro.server.schemas import ErrorBody

_LONGEST_HEAD: Final = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    head_seconds: float = 30.0

    _head_bytes = 0
    _late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._head_bytes > _LONGEST_HEAD and not self.transport.is_closing():
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The request's head is longer than {_LONGEST_HEAD} bytes. Send less in its headers.",
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, "The request is not valid HTTP. Check how the client was set up.")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._late = self.loop.call_later(self.head_seconds, self._drop)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _drop(self) -> None:
        """Without a word: it may never have been HTTP, and pools open connections ahead of need."""
        self._late = None
        self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._head_is_here()
        body = ErrorBody.of(BadRequest(message)).model_dump_json().encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
