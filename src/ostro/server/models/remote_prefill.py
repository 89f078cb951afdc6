"""Has another server prefill long prompts, and share their KV cache with this server's engine.

    engine: how much is cached? ──> POST /prefill ──> engine: look ──> the request is submitted, and finds its prompt

Whatever goes wrong, the prompt is computed here: it costs time, never a request.
"""

import asyncio
import logging
import time

import httpx
import msgspec

from ostro.engine.request import Request, Task
from ostro.engine_process.handle import EngineHandle
from ostro.errors import Unavailable

_CONNECT_SECONDS = 2.0
# After a failure, prompts are computed here for a while, so that they do not all wait for the next failure.
_PAUSE_SECONDS = 5.0
# Statuses that concern one request, not the server.
_REQUEST_ERRORS = (400, 404, 413, 422)

_log = logging.getLogger(__name__)


class RemotePrefill:
    """Use within one event loop."""

    def __init__(self, url: str, *, model: str, key: str | None, min_tokens: int, seconds: float) -> None:
        """`model` is the model's name there. Prompts of which fewer than `min_tokens` would be computed stay here; so
        do those that take longer than `seconds`.
        """
        self._url = url.rstrip("/")
        self._model, self._min_tokens = model, min_tokens
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._seconds = seconds
        self._client: httpx.AsyncClient | None = None
        self._not_before = 0.0
        self._is_failing = False

    async def ask(self, handle: EngineHandle, request: Request) -> None:
        """Returns once the engine can find the prompt's prefix, or once the prompt is to be computed here."""
        if not self._is_suitable(request) or time.monotonic() < self._not_before:
            return
        try:
            async with asyncio.timeout(self._seconds):
                if len(request.prompt_ids) - await _found(handle, request) < self._min_tokens:
                    return
                handle.counters.remote_prefills += 1
                await self._post(request)
                if len(request.prompt_ids) - await _found(handle, request, look=True) >= self._min_tokens:
                    raise _Failed("its pages are not found here: compare kv_shared and all other settings")
        except Unavailable:
            # This server's engine is down: submitting the request will report it.
            return
        except Exception as error:  # noqa: BLE001  whatever it is, the prompt can be computed here
            handle.counters.failed_prefills += 1
            self._note(error)
        else:
            if self._is_failing:
                _log.info("%s computes prompts again", self._url)
            self._is_failing = False

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _is_suitable(self, request: Request) -> bool:
        """Salted prompts are not shared, and prompts whose log-probabilities are wanted are computed anyway."""
        return (
            request.task is Task.GENERATE
            and not request.cache_salt
            and request.prompt_logprobs_from is None
            and len(request.prompt_ids) >= self._min_tokens
        )

    async def _post(self, request: Request) -> None:
        if self._client is None:
            # No proxy from the environment: prompts and the key are for that server alone.
            timeout = httpx.Timeout(self._seconds, connect=min(self._seconds, _CONNECT_SECONDS))
            self._client = httpx.AsyncClient(timeout=timeout, trust_env=False)
        body = msgspec.json.encode({"model": request.adapter or self._model, "prompts": [request.prompt_ids]})
        # The response body is not needed: only what the engine finds counts.
        async with self._client.stream("POST", f"{self._url}/prefill", content=body, headers=self._headers) as response:
            if response.status_code != httpx.codes.OK:
                raise _Failed(f"status {response.status_code}", pauses=response.status_code not in _REQUEST_ERRORS)

    def _note(self, error: Exception) -> None:
        if not isinstance(error, _Failed) or error.pauses:
            self._not_before = time.monotonic() + _PAUSE_SECONDS
        if not self._is_failing:
            reason = str(error) or type(error).__name__
            _log.warning("%s does not compute prompts for this server (%s): they are computed here", self._url, reason)
        self._is_failing = True


class _Failed(Exception):
    def __init__(self, reason: str, *, pauses: bool = True) -> None:
        super().__init__(reason)
        self.pauses = pauses


async def _found(handle: EngineHandle, request: Request, *, look: bool = False) -> int:
    return await handle.find_prefix(request.prompt_ids, request.adapter, look=look)
