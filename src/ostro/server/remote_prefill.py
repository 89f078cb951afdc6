"""Has another server compute long prompts, and leave their keys and values where this server's engine finds them.

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

_CONNECT_SECONDS = 2.0
# After a failure prompts are computed here for so long, so that not each of them waits for the next one.
_PAUSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class RemotePrefill:
    """Use within one event loop."""

    def __init__(self, url: str, *, model: str, key: str | None, min_tokens: int, seconds: float) -> None:
        """`model` is the model's name there. Prompts of which fewer than `min_tokens` would be computed stay here; so
        do those that take more than so many seconds.
        """
        self._url = url.rstrip("/")
        self._model, self._min_tokens = model, min_tokens
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )
        self._timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        self._seconds = seconds
        self._client: httpx.AsyncClient | None = None
        self._not_before = 0.0
        self._is_failing = False

    async def ask(self, handle: EngineHandle, request: Request) -> None:
        """Returns once the engine can find as much of the prompt as it ever will. Raises Unavailable if the engine is
        not ready.
        """
        if not self._is_suitable(request) or time.monotonic() < self._not_before:
            return
        ids, adapter = request.prompt_ids, request.adapter
        if len(ids) - await handle.find_prefix(ids, adapter) < self._min_tokens:
            return
        handle.counters.remote_prefills += 1
        try:
            async with asyncio.timeout(self._seconds):
                await self._post(ids, adapter)
        except (httpx.HTTPError, TimeoutError, _Refused) as error:
            handle.counters.failed_prefills += 1
            self._not_before = time.monotonic() + _PAUSE_SECONDS
            if not self._is_failing:
                _log.warning("%s computes no prompts (%s): they are computed here", self._url, _reason(error))
            self._is_failing = True
            return
        if self._is_failing:
            _log.info("%s computes prompts again", self._url)
        self._is_failing = False
        await handle.find_prefix(ids, adapter, look=True)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _is_suitable(self, request: Request) -> bool:
        """Those with a salt are nobody else's, and those whose log-probabilities are wanted are computed anyway."""
        return (
            request.task is Task.GENERATE
            and not request.cache_salt
            and request.prompt_logprobs_from is None
            and len(request.prompt_ids) >= self._min_tokens
        )

    async def _post(self, ids: tuple[int, ...], adapter: str | None) -> None:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout)
        body = msgspec.json.encode({"model": adapter or self._model, "prompts": [ids]})
        response = await self._client.post(f"{self._url}/prefill", content=body, headers=self._headers)
        if response.status_code != httpx.codes.OK:
            raise _Refused(f"status {response.status_code}")


class _Refused(Exception):
    pass


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
