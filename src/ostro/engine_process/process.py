"""The engine process: builds the runner, steps the engine, sends its heartbeat. `engine_process.handle` starts it.

reader thread      socket ──> inbox             when the socket closes, the API process is gone: exit at once
grammar threads    constraint ──> inbox         compiled while the request waits; prepared in the first idle moment
main thread        inbox ──> engine ──> socket   one message a step, for all sequences
heartbeat thread   counters ──> socket           also while a step runs
"""

import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec

from ostro.backends.fake import FakeRunner
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.engine.constraint import Grammars, Prototype
from ostro.engine.core import EngineCore
from ostro.engine.counters import Counters
from ostro.engine.profile import Recorded
from ostro.engine.request import Request, Task
from ostro.engine.runner import ModelRunner
from ostro.engine.speculation import speculation
from ostro.engine.tiers import Tiers
from ostro.engine_process.compiling import Compiled, ConstraintCompiler
from ostro.engine_process.faults import Faults
from ostro.engine_process.messages import (
    LENGTH,
    Abort,
    AllOffered,
    Boot,
    EndProfile,
    FindPrefix,
    Following,
    FromEngine,
    Heartbeat,
    LoadFailed,
    Loading,
    Located,
    ModelInfo,
    OfferAll,
    Offered,
    PrefixFound,
    Profiled,
    Ready,
    Refused,
    StartProfile,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decode_to_engine,
    frame,
)
from ostro.errors import BadRequest, ModelError, OstroError, Unavailable
from ostro.grammar.compiler import GrammarCompiler
from ostro.grammar.vocabulary import TokenizerLike
from ostro.processes.children import resident_bytes
from ostro.processes.log_relay import relay_logs
from ostro.processes.spawn import die_with_parent, leave
from ostro.sampling_params import SamplingParams
from ostro.sources.store import ModelStore
from ostro.weights import Checkpoint, open_checkpoint

HEARTBEAT_SECONDS = 0.5
# How long after its start an engine first looks whether it is idle: the first request should not meet preparations.
_SETTLING_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Channel:
    """The engine's end of the socket. Sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                leave()

    def receive(self) -> ToEngine | None:
        """The next message; None once the other side is gone."""
        try:
            header = self._file.read(LENGTH.size)
            return decode_to_engine(self._file.read(body_length(header))) if len(header) == LENGTH.size else None
        except OSError:
            return None


class Inbox:
    """Queue of messages for the engine. Its reader thread ends the process once the API process is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: SimpleQueue[ToEngine | Compiled] = SimpleQueue()
        threading.Thread(target=self._receive, name="reader", daemon=True).start()

    def get(self) -> ToEngine | Compiled:
        """The next message; blocks until there is one."""
        return self._messages.get()

    def put(self, message: FindPrefix | Compiled) -> None:
        """Adds a message from this process itself; safe from any thread."""
        self._messages.put(message)

    def empty(self) -> bool:
        return self._messages.empty()

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._messages.put(message)
        leave()


class EngineLoop:
    """Takes requests from the inbox, steps the engine while there is work, and sends each step's results."""

    def __init__(self, core: EngineCore, inbox: Inbox, channel: Channel, faults: Faults, grammars: Grammars) -> None:
        self.core = core
        self.inbox = inbox
        self.channel = channel
        self.faults = faults
        self._compiler = ConstraintCompiler(grammars, inbox.put)
        # Id of a request whose constraint is being compiled -> its choices that were aborted meanwhile.
        self._compiling: dict[int, list[int]] = {}
        # Requests whose prompts are shared when they end.
        self._sharing: dict[int, Request] = {}
        # Whether a profile is being written.
        self._writing = False
        self._heartbeat_lock = threading.Lock()

    def run(self) -> None:
        """Returns once the API process asks to stop."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if self.core.runner.spec.generates and self.core.runner.spec.constrains:
            threading.Thread(target=self._prepare_when_idle, name="prepare", daemon=True).start()
        while self._take_messages():
            self._step()
        # The final counters.
        self._send_heartbeat()
        self.core.close()

    def _step(self) -> None:
        began = time.monotonic()
        self.faults.before_step(self.core.scheduler.counters.steps)
        if progress := self.core.step(lambda: self._tell_course(began)):
            self.channel.send(Stepped(progress))
            if self._sharing:
                # At once: the next step may evict what nobody uses any more.
                for each in progress:
                    if each.finish_reason is not None and (request := self._sharing.pop(each.request_id, None)):
                        self._offer(request)

    def _tell_course(self, began: float) -> None:
        """Reports which requests started or were preempted. Before the step is computed, since it may take long."""
        begun, preempted = self.core.scheduler.begun, self.core.scheduler.preempted
        if begun or preempted:
            self.channel.send(Stepped([], begun, began, preempted))
        self.faults.before_running(self.core.scheduler.running)

    def _take_messages(self) -> bool:
        """Handles the messages that have arrived; blocks for one while there is no work. False means stop."""
        while not self.inbox.empty() or not self.core.has_work:
            if not self.core.has_work:
                self._check_pages()
            message = self.inbox.get()
            match message:
                case Submit(request=request):
                    self._submit(request)
                case Compiled() as compiled:
                    self._take_compiled(compiled)
                case Abort(request_id=request_id, choice=choice):
                    self._abort(request_id, choice)
                case FindPrefix(look=True):
                    self.core.look(partial(self.inbox.put, msgspec.structs.replace(message, look=False)))
                case FindPrefix(id=id, prompt_ids=prompt_ids, adapter=adapter):
                    self.channel.send(PrefixFound(id, self.core.num_found(prompt_ids, adapter)))
                case OfferAll():
                    self.core.offer_all(lambda: self.channel.send(AllOffered()))
                case StartProfile(path=path, max_steps=max_steps):
                    self._start_profile(path, max_steps)
                case EndProfile():
                    self.core.end_profile()
                case Stop():
                    return False
                case Boot():
                    raise AssertionError("an engine boots once")
        return True

    def _submit(self, request: Request) -> None:
        if request.constraint is None:
            self._add(request)
            return
        try:
            self.core.check(request)
        except BadRequest as error:
            self._refuse(request, error)
        else:
            self._compiling[request.id] = []
            self._compiler.submit(request)

    def _take_compiled(self, compiled: Compiled) -> None:
        request = compiled.request
        aborted = self._compiling.pop(request.id, None)
        if aborted is None:
            # The whole request was aborted.
            return
        if compiled.error is not None:
            self._refuse(request, compiled.error)
            return
        self._add(request, compiled.prototype)
        for choice in aborted:
            self.core.abort(request.id, choice)

    def _abort(self, request_id: int, choice: int | None) -> None:
        self._sharing.pop(request_id, None)
        if request_id not in self._compiling:
            self.core.abort(request_id, choice)
        elif choice is None:
            del self._compiling[request_id]
        else:
            self._compiling[request_id].append(choice)

    def _add(self, request: Request, prototype: Prototype | None = None) -> None:
        try:
            self.core.add(request, prototype)
        except BadRequest as error:
            self._refuse(request, error)
        else:
            if request.shares_prompt:
                self._sharing[request.id] = request

    def _offer(self, request: Request) -> None:
        self.core.offer(
            request.prompt_ids, request.adapter, lambda num_tokens: self.channel.send(Offered(request.id, num_tokens))
        )

    def _refuse(self, request: Request, error: OstroError) -> None:
        self.channel.send(Refused(request.id, error.message, error.param))

    def _start_profile(self, path: str, max_steps: int) -> None:
        def ended(recorded: Recorded) -> None:
            self.channel.send(Profiled(path, recorded.steps, recorded.error))
            self._writing = False

        def writing() -> None:
            # Told at once: the profiler may keep other threads from running while it writes.
            self._writing = True
            self._send_heartbeat()

        try:
            self.core.start_profile(Path(path), max_steps=max_steps, ended=ended, writing=writing)
        except OstroError as error:
            ended(Recorded(0, error.message))

    def _check_pages(self) -> None:
        """Crashes an idle engine that has leaked pages: it would stall later, far from the cause."""
        usage = self.core.scheduler.kv.usage
        assert usage.in_use == 0, f"the engine is idle, but {usage.in_use} of its {usage.total} pages are in use"
        held = usage.states - usage.states_free - usage.snapshots
        assert not held, f"the engine is idle, but {held} of its {usage.states} slots for states are in use"

    def _prepare_when_idle(self) -> None:
        """What the first structured output would otherwise wait for."""
        time.sleep(_SETTLING_SECONDS)
        while self.core.has_work or self._compiling:
            time.sleep(HEARTBEAT_SECONDS)
        self._compiler.prepare()

    def _beat(self) -> None:
        while True:
            if (failure := self.core.runner.failure) is not None:
                # The main thread may be waiting for a device that never answers.
                _log.error("%s", failure)
                leave()
            self._send_heartbeat()
            time.sleep(HEARTBEAT_SECONDS)

    def _send_heartbeat(self) -> None:
        """Sends one at a time: an older one that overtook a newer would deny that a profile is being written."""
        with self._heartbeat_lock:
            self.channel.send(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        scheduler = self.core.scheduler
        usage = scheduler.kv.usage
        return Heartbeat(
            counters=scheduler.counters,
            strides=self.core.runner.strides,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=usage.total,
            pages_free=usage.free,
            pages_cached=usage.cached,
            writing=self._writing,
            pages_host=usage.host,
            pages_disk=usage.disk,
            pages_shared=usage.shared,
            states_total=usage.states,
            states_free=usage.states_free,
            snapshots=usage.snapshots,
        )


@contextmanager
def told_of_loading(channel: Channel) -> Iterator[None]:
    """Reports CPU time while the block runs: the API process gives up on an engine that makes no progress."""
    over = threading.Event()

    def report() -> None:
        while not over.wait(HEARTBEAT_SECONDS):
            channel.send(Loading(time.process_time() - time.thread_time()))

    thread = threading.Thread(target=report, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def load(
    checkpoint: Checkpoint, config: EngineConfig, faults: Faults, following: Callable[[], None]
) -> tuple[EngineCore, ModelInfo]:
    """Loads the model, and warms it up by generating a few tokens. `following` is for `load_runner`."""
    started = time.monotonic()
    faults.before_load()
    runner = build_runner(checkpoint, config, faults, following)
    core = EngineCore(
        runner,
        prefix_caching=config.prefix_caching,
        pages_per_seq=config.pages_per_seq,
        adapters=config.adapter_names,
        speculation=speculation(config.speculative, runner.spec),
        tiers=_tiers(checkpoint, config, runner),
    )
    loaded = time.monotonic()
    warm_up(core)
    # What is loaded stays: keep the garbage collector from scanning it again and again during decoding.
    gc.collect()
    gc.freeze()
    spec = core.runner.spec
    return core, ModelInfo(
        name=checkpoint.name,
        max_len=core.scheduler.max_len,
        vocab_size=spec.vocab_size,
        generates=spec.generates,
        keeps_kv=spec.keeps_kv,
        num_puzzles=spec.num_puzzles,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        load_seconds=loaded - started,
        warm_up_seconds=time.monotonic() - loaded,
        resident_bytes=resident_bytes(),
        pages_bytes=spec.pages_bytes,
        device_bytes=spec.device_bytes,
        adapters=config.adapter_names,
        constrains=spec.constrains,
        device=spec.device,
        devices=spec.devices,
        backend=spec.backend,
        precision=spec.precision,
        num_programs=spec.num_programs,
    )


def build_runner(
    checkpoint: Checkpoint, config: EngineConfig, faults: Faults, following: Callable[[], None]
) -> ModelRunner:
    if faults.fake:
        if faults.follow is not None:
            following()
            time.sleep(faults.follow)
            raise SystemExit(0)
        vocab_size = checkpoint.config["vocab_size"]
        assert isinstance(vocab_size, int)
        resolved = DEVICE_KINDS["cpu"].resolve(config)
        return FakeRunner(
            page_size=resolved.page_size,
            num_pages=4096,
            max_seq_len=config.max_seq_len or 8192,
            vocab_size=vocab_size,
            max_batch_tokens=resolved.max_batch_tokens,
            max_batch_seqs=resolved.max_batch_seqs,
            strict=False,
            scripts=faults.scripts(),
        )
    # Imports numpy and the native library, or torch: the fake runner does without.
    from ostro.backends.loading import load_runner

    return load_runner(checkpoint, config, following=following)


def _tiers(checkpoint: Checkpoint, config: EngineConfig, runner: ModelRunner) -> Tiers | None:
    if not config.has_tiers:
        return None
    from ostro.backends.tiers.opening import open_tiers

    return open_tiers(checkpoint, config, runner)


def model_grammars(checkpoint: Checkpoint, config: EngineConfig, width: int) -> Grammars:
    """The model's grammar compiler; loads the tokenizer for the first constraint. `width` is that of the logits."""

    def tokenizer() -> TokenizerLike:
        # Slower to import than everything else here, and most engines never need it.
        from ostro.text.model_tokenizer import load_tokenizer

        return load_tokenizer(config, checkpoint)

    return GrammarCompiler(tokenizer, width)


def warm_up(core: EngineCore) -> None:
    """Generates a few tokens, for one sequence and for two, so that the first request finds everything warm.

    Raises ModelError for a model whose results are not finite: nearly every weight takes part in them. A single bad
    embedding row is tolerated, since perhaps nobody uses that token: a second trial uses another token.
    """
    if core.scheduler.max_len > 1 and _trial(core, 0) and (error := _trial(core, core.runner.spec.vocab_size // 2)):
        raise ModelError(error)
    core.scheduler.kv.clear_cache()
    core.scheduler.count_from(Counters(compile_seconds=core.runner.spec.compile_seconds))


def _trial(core: EngineCore, token: int) -> str | None:
    """Runs a prompt of this one token. Returns the error, if there was one."""
    most = core.scheduler.max_len
    prompt = (token,) * min(4, most - 1)
    if core.runner.spec.generates:
        params, task = SamplingParams(max_tokens=min(2, most - len(prompt)), n=2, temperature=0), Task.GENERATE
    else:
        params, task = SamplingParams(max_tokens=0), Task.EMBED
    core.add(Request(id=0, prompt_ids=prompt, params=params, seed=0, task=task))
    errors = []
    while core.has_work:
        errors += [gain.error for gain in core.step() if gain.error is not None]
    return errors[0] if errors else None


def main() -> int:
    die_with_parent()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    relay_logs(channel.send)
    inbox = Inbox(channel)
    boot = inbox.get()
    assert isinstance(boot, Boot), "the first message is Boot"
    faults = Faults.from_environment()
    try:
        with told_of_loading(channel):
            checkpoint = open_checkpoint(boot.path or boot.config.model, model_config=boot.config.model_config)
            name = boot.name or checkpoint.name
            # Keeps the model's files from being deleted while this process runs.
            held = ModelStore().hold(checkpoint.path)
            channel.send(Located(name, str(checkpoint.path)))
            core, info = load(checkpoint, boot.config, faults, lambda: channel.send(Following()))
    except SystemExit:
        # The engine that this one followed has ended.
        return 0
    except Unavailable as error:
        # A rank or a host was lost: the next start may succeed.
        _log.error("%s", error.message)
        return 1
    except OstroError as error:
        channel.send(LoadFailed(type(error).__name__, error.message))
        return 1
    channel.send(Ready(msgspec.structs.replace(info, name=name)))
    with held:
        grammars = model_grammars(checkpoint, boot.config, core.runner.spec.vocab_size)
        EngineLoop(core, inbox, channel, faults, grammars).run()
    return 0


if __name__ == "__main__":
    status = main()
    # Skip interpreter shutdown, which tears down daemon threads and device libraries in no defined order.
    sys.stderr.flush()
    os._exit(status)
