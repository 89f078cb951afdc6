"""Which sequences run next. Knows pages and budgets; knows no tensors and no text.

There is no prefill phase and no decode phase. A sequence has tokens, some of them computed; a step lets it catch up,
under one budget of tokens:

    running   [ A: 1 to go ][ B: 1 to go ][ C: 700 to go ]    the budget is 512
    batch     [ A 1 ][ B 1 ][ C 510 ]                         C finishes in the next step

When pages run out, the sequence that ranks last gives its own back and waits: it will compute again what the prefix
cache has lost by then. The one that ranks first is never preempted, so the engine always gets on.

A waiting sequence is not let in while a step computes the next page that it could share; after the step it finds that
page in the prefix cache. So requests that start alike and arrive together compute their common pages once. This costs
one step at a time: there is budget left for a newcomer only when every running sequence reaches its end in the step.
"""

from bisect import insort
from dataclasses import dataclass, field

from ostro.engine.batch import Batch, Chunk
from ostro.engine.door import Door
from ostro.engine.kv import Admission, KVCache, PageName
from ostro.engine.request import Request, Task
from ostro.engine.sequence import FinishReason, Sequence
from ostro.errors import BadRequest
from ostro.runner.base import RunnerSpec, StepOutput, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_batch_tokens: int = 512
    """Tokens computed in one step."""
    max_batch_seqs: int = 64
    """Sequences that run at a time."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_batch_seqs"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} must be at least 1, got {getattr(self, name)}.", param=name)


@dataclass(slots=True)
class Progress:
    """What one step brought one sequence."""

    request_id: int
    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    pooled: list[float] | None = None

    def merge(self, later: "Progress") -> None:
        """Takes in what a later step brought the same sequence."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason, self.error, self.pooled = later.finish_reason, later.error, later.pooled


@dataclass(slots=True)
class Counters:
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache, and how many of them were found."""
    cache_hits: int = 0


class Scheduler:
    def __init__(self, spec: RunnerSpec, limits: Limits, *, prefix_caching: bool = True) -> None:
        self.limits = limits
        self.kv = KVCache(num_pages=spec.num_pages, page_size=spec.page_size, prefix_caching=prefix_caching)
        self.counters = Counters()
        self.max_len = min(spec.max_seq_len, spec.num_pages * spec.page_size)
        self._door = Door(max_len=self.max_len, vocab_size=spec.vocab_size, generates=spec.generates)
        # Both sorted by rank.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Request's id -> its choices that have not ended.
        self._live: dict[int, list[Sequence]] = {}
        # Leader's id -> the other choices of its request, until the leader's prompt is computed.
        self._followers: dict[int, list[Sequence]] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request. One that could never run is refused here, and nothing changes."""
        self.check(request)
        max_len = self._door.longest(request)
        assert request.id not in self._live, f"request {request.id} was added twice"
        seqs = [self._sequence(request, choice, max_len) for choice in range(request.params.n)]
        self._live[request.id] = list(seqs)
        leader, *followers = seqs
        if followers:
            self._followers[leader.id] = followers
        insort(self.waiting, leader, key=_rank)

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that could never run."""
        self._door.check(request)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, and frees its pages. Unknown ids are ignored: it may just have ended."""
        for seq in list(self._live.get(request_id, ())):
            if choice in (None, seq.choice):
                self._end(seq, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Ends every request, and forgets every cached prefix."""
        for request_id in list(self._live):
            self.abort(request_id)
        self.kv.take_copies()
        self.kv.clear_cache()

    def schedule(self) -> Batch | None:
        """The next step's work, or None if there is none."""
        chunks: list[Chunk] = []
        budget = self.limits.max_batch_tokens
        preempted = self.counters.preemptions
        # Sequences with one token to go come first: they are cheap, and someone reads along.
        for seq in sorted(self.running, key=lambda seq: seq.num_to_compute > 1):
            if budget and seq.pages and self._extend(seq):
                budget -= self._add_chunk(chunks, seq, budget)
        if budget and self.waiting and self.counters.preemptions == preempted:
            self._admit_waiting(chunks, budget)
        if not chunks:
            assert not self.has_work, "sequences wait and none can run"
            return None
        return Batch(tuple(chunks), self.kv.take_copies())

    def apply(self, batch: Batch, output: StepOutput) -> list[Progress]:
        """Takes a step's results in: what each sequence of the batch gained, in the batch's order."""
        self.counters.steps += 1
        self.counters.computed_tokens += batch.num_tokens
        progress: list[Progress] = []
        for chunk in batch.chunks:
            # A sequence that was aborted while the step ran has no pages left.
            if chunk.seq.finish_reason is None:
                progress += self._apply_chunk(chunk, output)
        return [p for p in progress if p.token_ids or p.prompt_logprobs or p.finish_reason]

    def check_integrity(self) -> None:
        self.kv.check_integrity(self.running)

    def _apply_chunk(self, chunk: Chunk, output: StepOutput) -> list[Progress]:
        seq = chunk.seq
        seq.num_computed = chunk.end
        self.kv.commit(seq)
        own = Progress(seq.request.id, seq.choice, num_cached=seq.num_cached or 0)
        if chunk.scored:
            own.prompt_logprobs = output.prompt_logprobs[seq.id]
            seq.num_scored += len(own.prompt_logprobs)
        if seq.id in output.pooled:
            vector = output.pooled[seq.id]
            seq.pooled = vector if seq.pooled is None else [a + b for a, b in zip(seq.pooled, vector, strict=True)]
        if chunk.end < seq.num_prompt:
            return [own]
        progress = [own]
        # Followers first: they fork from pages that the leader gives back if its first token is its last.
        for follower in self._followers.pop(seq.id, ()):
            progress.append(Progress(follower.request.id, follower.choice, num_cached=own.num_cached))
            # The leader's lookup and its prompt's log-probabilities were delivered for all choices.
            follower.num_cached, follower.num_scored = seq.num_cached, seq.num_scored
            self._take_token(follower, output, progress[-1])
            if follower.finish_reason is None:
                self._start_follower(seq, follower)
        self._take_token(seq, output, own)
        return progress

    def _take_token(self, seq: Sequence, output: StepOutput, progress: Progress) -> None:
        """Appends the token sampled for the sequence, if any, and ends it if it is complete. Its prompt is computed."""
        sampled = output.sampled.get(seq.id)
        if sampled is not None and sampled.error is not None:
            progress.error = sampled.error
            self._end(seq, FinishReason.ERROR)
        elif sampled is not None:
            seq.token_ids.append(sampled.token_id)
            self.counters.generated_tokens += 1
            progress.token_ids.append(sampled.token_id)
            if sampled.logprob is not None:
                progress.logprobs.append(sampled.logprob)
            if sampled.token_id in seq.stop_ids and seq.num_output > seq.request.params.min_tokens:
                self._end(seq, FinishReason.STOP)
            elif seq.num_tokens >= seq.max_len:
                self._end(seq, FinishReason.LENGTH)
        elif seq.num_tokens >= seq.max_len:
            self._end(seq, FinishReason.LENGTH)
        progress.finish_reason = seq.finish_reason
        if seq.finish_reason is not None:
            progress.pooled = seq.pooled

    def _start_follower(self, leader: Sequence, follower: Sequence) -> None:
        """Forks the leader's pages, or lets the follower wait its turn and find the prompt in the prefix cache."""
        if len(self.running) < self.limits.max_batch_seqs and self.kv.fork(leader, follower):
            insort(self.running, follower, key=_rank)
        else:
            insort(self.waiting, follower, key=_rank)

    def _add_chunk(self, chunks: list[Chunk], seq: Sequence, budget: int) -> int:
        start, length = seq.num_computed, min(seq.num_to_compute, budget)
        end = start + length
        scored = range(max(start, seq.next_scored), min(end, seq.num_prompt - 1))
        chunks.append(Chunk(seq, start, length, self._samplers(seq, end), scored))
        return length

    def _samplers(self, seq: Sequence, end: int) -> tuple[Sequence, ...]:
        if end < seq.num_tokens or seq.num_tokens >= seq.max_len:
            return ()
        return (seq, *self._followers.get(seq.id, ()))

    def _extend(self, seq: Sequence) -> bool:
        """Makes sure of pages for all tokens of a running sequence, at the cost of those that rank behind it."""
        while not self.kv.extend(seq, seq.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        self.running.remove(seq)
        self.kv.release(seq)
        seq.pooled = None
        insort(self.waiting, seq, key=_rank)

    def _admit_waiting(self, chunks: list[Chunk], budget: int) -> None:
        """Adds waiting sequences to the step, by rank, while there is budget and room."""
        filling = {self.kv.next_page(chunk.seq, chunk.end) for chunk in chunks}
        # One that waits for a page to be cached keeps its seat: those behind it must not fill the batch meanwhile.
        seats = self.limits.max_batch_seqs - len(self.running)
        for seq in self.waiting[:seats]:
            admission = self._admit(seq, filling)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.GRANTED:
                budget -= self._add_chunk(chunks, seq, budget)
                filling.add(self.kv.next_page(seq, chunks[-1].end))
                if not budget:
                    break

    def _admit(self, seq: Sequence, filling: set[PageName | None]) -> Admission:
        # Keep the last token out of the hit: logits need one computed position.
        hit_limit = min(seq.num_tokens - 1, seq.next_scored)
        if seq.request.task is Task.EMBED:
            hit_limit = 0
        # A page to spare for each running sequence, so that the newcomer does not preempt one at once.
        admission = self.kv.admit(seq, hit_limit=hit_limit, spare=len(self.running), filling=filling)
        if admission is not Admission.GRANTED:
            return admission
        self.waiting.remove(seq)
        insort(self.running, seq, key=_rank)
        if seq.num_cached is None and seq.num_output == 0:
            seq.num_cached = seq.num_computed
            self.counters.cache_queries += seq.num_prompt
            self.counters.cache_hits += seq.num_cached
        return admission

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if seq.pages:
            self.running.remove(seq)
            self.kv.release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        siblings = self._live[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._live[seq.request.id]
        if reason is FinishReason.ABORT:
            self._leave_group(seq, siblings)

    def _leave_group(self, seq: Sequence, siblings: list[Sequence]) -> None:
        """Takes an aborted sequence out of the choices that are still to fork; another leads if it was the leader."""
        heirs = self._followers.pop(seq.id, [])
        if heirs:
            heir, *rest = heirs
            insort(self.waiting, heir, key=_rank)
            if rest:
                self._followers[heir.id] = rest
        for leader in siblings:
            if seq in self._followers.get(leader.id, ()):
                self._followers[leader.id].remove(seq)

    def _sequence(self, request: Request, choice: int, max_len: int) -> Sequence:
        self._next_id += 1
        return Sequence(self._next_id, request, choice=choice, max_len=max_len)


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.rank
