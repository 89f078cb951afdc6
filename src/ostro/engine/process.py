"""The engine process: builds the runner, steps the engine, reports its pulse. Started by `engine.handle`, never forked.

reader thread   socket ──> inbox             the API process is gone when the socket ends: exit at once
main thread     inbox ──> engine ──> socket   one message a step, for all sequences
pulse thread    counters ──> socket           also while a step runs
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue

from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.faults import Faults
from ostro.engine.messages import (
    LENGTH,
    Abort,
    Boot,
    FromEngine,
    LoadFailed,
    ModelInfo,
    Pulse,
    Ready,
    Refused,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_to_engine,
    frame,
)
from ostro.engine.request import Request
from ostro.engine.scheduler import Counters, Limits
from ostro.errors import BadRequest, OstroError
from ostro.runner.base import ModelRunner
from ostro.runner.fake import FakeRunner
from ostro.sampling_params import SamplingParams
from ostro.weights import Checkpoint, open_checkpoint

PULSE_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


class Channel:
    """The engine's end of the socket. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self) -> ToEngine | None:
        """The next message; None once the other side is gone."""
        header = self._file.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        return decode_to_engine(self._file.read(body_length(header)))


class EngineLoop:
    """Takes requests from the channel, steps the engine while there is work, sends what each step brought."""

    def __init__(self, core: EngineCore, channel: Channel, faults: Faults) -> None:
        self.core = core
        self.channel = channel
        self.faults = faults
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()

    def run(self) -> None:
        """Returns once the API process asks to stop."""
        threading.Thread(target=self._receive, name="reader", daemon=True).start()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        while self._take_messages():
            self.faults.before_step(self.core.scheduler.counters.steps)
            if progress := self.core.step():
                self.channel.send(Stepped(progress))
            elif not self.core.has_work:
                self.core.check_integrity()

    def _take_messages(self) -> bool:
        """Handles what has arrived, and waits for something if there is nothing to do. False: stop."""
        while not self._inbox.empty() or not self.core.has_work:
            match self._inbox.get():
                case Submit(request=request):
                    self._submit(request)
                case Abort(request_id=request_id, choice=choice):
                    self.core.abort(request_id, choice)
                case Stop():
                    return False
                case Boot():
                    raise AssertionError("an engine boots once")
        return True

    def _submit(self, request: Request) -> None:
        try:
            self.core.add(request)
        except BadRequest as error:
            self.channel.send(Refused(request.id, error.message, error.param))

    def _receive(self) -> None:
        while (message := self.channel.receive()) is not None:
            self._inbox.put(message)
        # Nobody is left to work for. A step may be running, or stuck: no orderly way out is sure to end.
        os._exit(0)

    def _beat(self) -> None:
        while True:
            self.channel.send(pulse(self.core))
            time.sleep(PULSE_SECONDS)


def pulse(core: EngineCore) -> Pulse:
    scheduler = core.scheduler
    counters, usage = scheduler.counters, scheduler.kv.usage
    return Pulse(
        steps=counters.steps,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pages_total=usage.total,
        pages_free=usage.free,
        pages_cached=usage.cached,
        computed_tokens=counters.computed_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        cache_queries=counters.cache_queries,
        cache_hits=counters.cache_hits,
    )


def load(config: EngineConfig, faults: Faults) -> tuple[EngineCore, ModelInfo]:
    """A warm engine: its model is loaded and has generated tokens."""
    started = time.monotonic()
    checkpoint = open_checkpoint(config.model)
    limits = Limits(max_batch_tokens=config.max_batch_tokens, max_batch_seqs=config.max_batch_seqs)
    core = EngineCore(build_runner(checkpoint, config, faults), limits, prefix_caching=config.prefix_caching)
    loaded = time.monotonic()
    warm_up(core)
    spec = core.runner.spec
    return core, ModelInfo(
        name=checkpoint.name,
        max_len=core.scheduler.max_len,
        vocab_size=spec.vocab_size,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        load_seconds=loaded - started,
        warm_up_seconds=time.monotonic() - loaded,
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def build_runner(checkpoint: Checkpoint, config: EngineConfig, faults: Faults) -> ModelRunner:
    if faults.fake:
        vocab_size = checkpoint.config["vocab_size"]
        assert isinstance(vocab_size, int)
        return FakeRunner(page_size=config.page_size, num_pages=4096, max_seq_len=8192, vocab_size=vocab_size)
    # The one import of torch: the fake runner does without it.
    from ostro.runner.torch_runner import load_runner

    return load_runner(checkpoint, config)


def warm_up(core: EngineCore) -> None:
    """Generates a few tokens for one sequence and for two, so that the first request finds everything prepared."""
    params = SamplingParams(max_tokens=2, n=2, temperature=0, ignore_eos=True)
    core.add(Request(id=0, prompt_ids=(0,) * min(4, core.scheduler.max_len - 2), params=params, seed=0))
    while core.has_work:
        core.step()
    core.scheduler.kv.clear_cache()
    core.scheduler.counters = Counters()


def die_with_parent() -> None:
    """Where the kernel can, ends this process when its parent ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    die_with_parent()
    # Ctrl-C reaches the whole process group; what it means is the API process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    boot = channel.receive()
    assert isinstance(boot, Boot), "the first message is Boot"
    faults = Faults.from_environment()
    try:
        core, info = load(boot.config, faults)
    except OstroError as error:
        channel.send(LoadFailed(type(error).__name__, error.message))
        return 1
    channel.send(Ready(info))
    EngineLoop(core, channel, faults).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
