"""Which sequences run next. Knows pages and budgets; knows no tensors and no text.

There is no prefill phase and no decode phase. A sequence has tokens, some of them computed; a step lets it catch up,
under one budget of tokens:

    running   [ A: 1 to go ][ B: 1 to go ][ C: 700 to go ]    the budget is 512
    batch     [ A 1 ][ B 1 ][ C 510 ]                         C finishes in the next step

When pages run out, the lowest-ranked sequence gives up its pages and waits: later it recomputes whatever the prefix
cache has lost by then. The highest-ranked one is never preempted, so the engine always makes progress.

The next step may be scheduled while a step's results are still pending: `schedule` decides on a step, `advance` assumes
that it succeeds, and `apply` takes in its results, perhaps a step later. A sequence may have ended by then, and its
results are dropped. Steps run in order, so an old owner's writes to a page precede those of its next owner.

A waiting sequence whose prefix continues in a lower tier waits until that has been fetched, while others run.

A waiting sequence is not admitted while a step computes the next page that it could share; after the step it finds that
page in the prefix cache. So requests with a common prefix that arrive together compute it once. This costs one step at
a time: there is budget left for a new sequence only when every running sequence catches up in the step.

A model without a KV cache recomputes the whole sequence for each token. Its steps cost what they recompute, and the
last sequence admitted may exceed the budget, so a long one waits only for those that came before it. Scoring a prompt
on such a model takes one pass per position: such prompts share half of the budget while there is other work.

If several tenants have work, rank decides among one tenant's requests, and `engine.tenants` between tenants: one with
less than its share of the batch is admitted first, preempting one that has more if necessary. A tenant with nothing in
the batch yet is admitted in a separate step.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import msgspec

from ostro.engine.admission import AdmissionRules
from ostro.engine.batch import Batch, Chunk
from ostro.engine.constraint import Prototype
from ostro.engine.counters import Counters
from ostro.engine.kv import Admission, KVCache, PageName
from ostro.engine.page_store import Arrival
from ostro.engine.request import Request, Task
from ostro.engine.runner import NOT_FINITE, RunnerSpec, SampledToken, Solution, StepOutput, TokenLogprob
from ostro.engine.sequence import FinishReason, Sequence
from ostro.engine.speculation import Speculation
from ostro.engine.states import Spacing, States
from ostro.engine.tenants import Holdings, divide, next_in_line
from ostro.engine.tiers import Tiers
from ostro.errors import BadRequest, SequenceFailed

# At most this many waiting sequences, the first in line, are looked up in lower tiers per step: prompts may be long.
_MOST_LOOKS = 4


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


class Progress(msgspec.Struct, omit_defaults=True, gc=False):
    """One sequence's results from one step."""

    request_id: int
    choice: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    pooled: list[float] | None = None
    solution: Solution | None = None
    num_predicted: int = 0
    """Tokens drafted from the text that the request predicts, and how many of them were accepted."""
    num_accepted: int = 0

    def merge(self, later: "Progress") -> None:
        """Adds the results of a later step of the same sequence."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason, self.error, self.pooled = later.finish_reason, later.error, later.pooled
        self.solution = later.solution
        self.num_predicted += later.num_predicted
        self.num_accepted += later.num_accepted


class Scheduler:
    def __init__(
        self,
        spec: RunnerSpec,
        limits: Limits,
        *,
        prefix_caching: bool = True,
        pages_per_seq: int | None = None,
        adapters: Collection[str] = (),
        speculation: Speculation | None = None,
        tiers: Tiers | None = None,
        spacing: Spacing | None = None,
    ) -> None:
        """`speculation` drafts tokens for runners that can verify them; None drafts nothing. `tiers` keep evicted pages
        of the prefix cache. `spacing` is that of snapshots of recurrent states.
        """
        states, self._keeps_states = None, spec.num_states > 0
        if self._keeps_states:
            states = States(spec.num_states, page_size=spec.page_size, every=spec.state_every, spacing=spacing)
            # Each sequence in the batch has a slot.
            limits = replace(limits, max_batch_seqs=min(limits.max_batch_seqs, spec.num_states))
        self.limits = limits
        self.speculation = speculation if spec.max_sampled and spec.keeps_kv else None
        self._max_sampled = spec.max_sampled
        self._keeps_kv = spec.keeps_kv
        self._masks_late = spec.masks_late
        self._context_price = spec.context_price
        self.kv = KVCache(
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            prefix_caching=prefix_caching,
            tiers=tiers,
            states=states,
        )
        self._tiers = tiers
        self.count_from(Counters())
        most_pages = min(spec.num_pages, pages_per_seq or spec.num_pages)
        self.max_len = min(spec.max_seq_len, most_pages * spec.page_size)
        self._admission = AdmissionRules(
            max_len=self.max_len,
            vocab_size=spec.vocab_size,
            generates=spec.generates,
            keeps_kv=spec.keeps_kv,
            num_puzzles=spec.num_puzzles,
            adapters=adapters,
            constrains=spec.constrains,
        )
        # Both sorted by rank.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        # Request id -> its unfinished choices.
        self._live: dict[int, list[Sequence]] = {}
        # Leader's id -> the other choices of its request, until the leader's prompt is computed.
        self._followers: dict[int, list[Sequence]] = {}
        # Tenant -> number of its unfinished requests.
        self._tenants: Counter[str] = Counter()
        # Whether the latest step was reserved for new tenants.
        self._for_newcomers = False
        self._next_id = 0
        # Requests that started in the latest step, and those preempted for it.
        self.begun: list[int] = []
        self.preempted: list[int] = []
        # Sequences that wait for pages from a lower tier; cleared whenever pages arrive.
        self._fetching: set[int] = set()
        # Sequences that were looked up in lower tiers since any page arrived or was evicted, and the evictions by then.
        self._looked_ahead: set[int] = set()
        self._looked_after = 0
        # Steps in flight: launched, but their results are not applied yet.
        self._under_way = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def count_from(self, counters: Counters) -> None:
        """Continues counting from these totals."""
        self.counters = counters
        if self._tiers is not None:
            self._tiers.counters = counters

    def add(self, request: Request, prototype: Prototype | None = None) -> None:
        """Queues a request. Raises BadRequest, and changes nothing, for one that could never run.

        `prototype` is the request's compiled constraint; None if and only if it has no constraint.
        """
        self.check(request)
        assert (request.constraint is None) == (prototype is None), f"request {request.id} is not compiled"
        assert request.id not in self._live, f"request {request.id} was added twice"
        seqs = self._sequences(request, prototype)
        if self.speculation is not None:
            self.speculation.begin(seqs)
        self._live[request.id] = list(seqs)
        self._tenants[request.tenant] += 1
        leader, *followers = seqs
        if followers:
            self._followers[leader.id] = followers
        insort(self.waiting, leader, key=_rank)

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that could never run."""
        self._admission.check(request)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, and frees its pages. Ignores unknown ids: it may just have ended."""
        for seq in list(self._live.get(request_id, ())):
            if choice in (None, seq.choice):
                self._end(seq, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Ends every request, and forgets every cached prefix."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._under_way = 0
        self.kv.abandon_moves()

    def schedule(self) -> Batch | None:
        """The next step's work; None if there is none, or none until a step in flight has its results."""
        chunks: list[Chunk] = []
        budgets = self._budgets()
        self.begun, self.preempted = [], []
        if self.speculation is not None and self._waits_to_draft(self.speculation, max(budgets.values())):
            return None
        if self.waiting and self._is_shared:
            self._make_way()
            self._admit_newcomers(chunks, budgets)
        self._for_newcomers = bool(chunks)
        if not chunks:
            self._fill_step(chunks, budgets)
        if not chunks:
            assert self._under_way or not self.has_work or self.kv.is_moving, "sequences are waiting but none can run"
            return None
        if self.speculation is not None:
            self._add_drafts(self.speculation, chunks, max(budgets.values()))
        return Batch(tuple(chunks), self.kv.take_copies(), self.kv.take_state_copies())

    def take_arrival(self, arrival: Arrival) -> None:
        """Makes pages from a lower tier available to the sequences that wait for them."""
        self.kv.take_arrival(arrival)
        self._fetching.clear()
        self._looked_ahead.clear()

    def advance(self, batch: Batch) -> None:
        """Call once the step is launched: counts its tokens as computed, and reserves places for those it samples."""
        self._under_way += 1
        page_size = self.kv.page_size
        for chunk in batch.chunks:
            seq = chunk.seq
            seq.num_computed = end = chunk.end
            seq.num_unapplied = 0
            if chunk.scored:
                seq.scores = range(chunk.scored.stop, seq.scores.stop)
            # A single token fills a page only at every page_size-th position.
            if chunk.length > 1 or not end % page_size:
                self.kv.commit(seq)
            if chunk.samples:
                # Followers first: they fork from the prompt's pages.
                for follower in self._followers.pop(seq.id, ()):
                    # The leader's lookup and its prompt's log-probabilities are delivered for all choices.
                    follower.num_cached, follower.scores = seq.num_cached, seq.scores
                    self._start_follower(seq, follower)
                    follower.expect()
                seq.expect()
                seq.is_drafted = bool(chunk.drafts)

    def apply(self, batch: Batch, output: StepOutput) -> list[Progress]:
        """Applies a step's results. Returns each sequence's progress, in the batch's order."""
        self._under_way -= 1
        self.counters.steps += 1
        # Only accepted drafts count as computed tokens.
        self.counters.computed_tokens += sum(
            [chunk.length if self._keeps_kv else chunk.recomputed for chunk in batch.chunks]
        )
        self.counters.outer_steps += output.outer_steps
        self.counters.recompiles += output.recompiles
        self.counters.saved_steps += output.saved_steps
        gains: list[Progress] = []
        for chunk in batch.chunks:
            if output.pooled or output.solved or not _brings_one_token(chunk):
                progress = self._apply_chunk(chunk, output)
                gains += [p for p in progress if p.token_ids or p.prompt_logprobs or p.finish_reason]
            elif chunk.seq.finish_reason is None:
                gains.append(self._take_only_token(chunk.seq, output.sampled[chunk.seq.id]))
        return gains

    def check_integrity(self) -> None:
        self.kv.check_integrity(self.running)

    def _apply_chunk(self, chunk: Chunk, output: StepOutput) -> list[Progress]:
        seq = chunk.seq
        # A sequence at its maximum length ends without sampling, such as a prompt that is only scored.
        read = not chunk.samples and chunk.end == seq.num_known == seq.max_len
        # Non-finite numbers anywhere in the prompt end all choices of the request.
        failed = bool(chunk.scored or output.pooled) and _is_broken(chunk, output)
        prompt_logprobs = self._take_scores(chunk, output) if chunk.scored and not failed else []
        gaining = chunk.samples or (seq, *(self._followers.pop(seq.id, ()) if read or failed else ()))
        # Sequences aborted while the step ran get nothing more.
        live = [seq for seq in gaining if seq.finish_reason is None]
        if not live:
            seq.unheard_logprobs += prompt_logprobs
            return []
        progress = [Progress(seq.request.id, seq.choice, num_cached=seq.num_cached or 0) for seq in live]
        if failed:
            for seq, gain in zip(live, progress, strict=True):
                gain.finish_reason, gain.error = FinishReason.ERROR, NOT_FINITE
                self._end(seq, FinishReason.ERROR)
            return progress
        if chunk.scored or chunk.seq.unheard_logprobs:
            progress[0].prompt_logprobs = chunk.seq.unheard_logprobs + prompt_logprobs
            chunk.seq.unheard_logprobs = []
        if chunk.seq.num_forced and (chunk.samples or read):
            self._deliver_forced(chunk.seq, live, progress)
        progress[0].solution = output.solved.get(chunk.seq.id)
        if chunk.seq.id in output.pooled:
            self._pool(chunk, output.pooled[chunk.seq.id])
        for seq, gain in zip(live, progress, strict=True):
            if chunk.samples:
                self._take_token(seq, output.sampled[seq.id], gain)
                if chunk.drafts:
                    self._take_drafts(chunk, output.followed[seq.id], gain)
                if self.speculation is not None:
                    self.speculation.learn(seq, gain.token_ids)
            elif read:
                self._end(seq, seq.closing)
            gain.finish_reason = seq.finish_reason
            if seq.finish_reason is not None:
                gain.pooled = seq.pooled
        return progress

    def _take_only_token(self, seq: Sequence, sampled: SampledToken) -> Progress:
        """What `_apply_chunk` does for most chunks of most steps: see `_brings_one_token`."""
        gain = Progress(seq.request.id, seq.choice, num_cached=seq.num_cached or 0)
        self._take_token(seq, sampled, gain)
        if self.speculation is not None:
            self.speculation.learn(seq, gain.token_ids)
        if seq.finish_reason is not None:
            gain.finish_reason, gain.pooled = seq.finish_reason, seq.pooled
        return gain

    def _take_scores(self, chunk: Chunk, output: StepOutput) -> list[TokenLogprob]:
        """Returns prompt tokens' log-probabilities. Keeps those of forced tokens until the tokens are delivered."""
        seq, found = chunk.seq, output.scored[chunk.seq.id]
        num_of_prompt = seq.num_prompt - 1 - chunk.scored.start
        if num_of_prompt >= len(found):
            return found
        params, border = seq.request.params, max(0, num_of_prompt)
        seq.forced_logprobs += [each.listing(params.logprobs or 0) for each in found[border:]]
        return [each.listing(params.prompt_logprobs or 0) for each in found[:border]]

    def _deliver_forced(self, leader: Sequence, live: list[Sequence], progress: list[Progress]) -> None:
        """Delivers forced tokens with the token that follows them, or at the end. Choices about to fork share them."""
        for seq, gain in zip(live, progress, strict=True):
            self._tell_forced(seq, gain)
            gain.logprobs += leader.forced_logprobs
        leader.forced_logprobs = []

    def _tell_forced(self, seq: Sequence, gain: Progress) -> None:
        known = seq.num_known
        gain.token_ids += seq.token_ids[known - seq.num_forced : known]
        self.counters.generated_tokens += seq.num_forced
        self.counters.forced_tokens += seq.num_forced
        seq.num_forced = 0

    def _pool(self, chunk: Chunk, vector: list[float]) -> None:
        """Adds the chunk's contribution to its sequence's embedding. A preempted sequence starts over."""
        seq = chunk.seq
        whole = seq.pooled if chunk.start else None
        seq.pooled = vector if whole is None else [a + b for a, b in zip(whole, vector, strict=True)]

    def _take_token(self, seq: Sequence, sampled: SampledToken, gain: Progress) -> None:
        """Fills in the token that the sequence expected, and ends the sequence if that completes it."""
        if sampled.error is not None:
            gain.error = sampled.error
            self._end(seq, FinishReason.ERROR)
            return
        token = sampled.token_id
        looping = seq.learn(token)
        known = len(seq.token_ids) - seq.num_pending
        self.counters.generated_tokens += 1
        gain.token_ids.append(token)
        if sampled.logprob is not None:
            gain.logprobs.append(sampled.logprob)
        if seq.pages and not min(seq.num_computed, known) % self.kv.page_size:
            self.kv.commit(seq)
        if token in seq.stop_ids and known - seq.num_prompt > seq.request.params.min_tokens:
            self._end(seq, FinishReason.STOP)
        elif seq.matcher is not None and (failure := seq.follow(token)) is not None:
            gain.error = failure
            self._end(seq, FinishReason.ERROR)
        elif seq.num_known >= seq.max_len:
            # Forced tokens at the end need no step, unless their log-probabilities are wanted.
            if not seq.scores:
                self._tell_forced(seq, gain)
                self._end(seq, seq.closing)
        elif looping:
            self._end(seq, FinishReason.REPETITION)

    def _take_drafts(self, chunk: Chunk, followed: list[SampledToken], gain: Progress) -> None:
        """Accepts drafts as long as they equal what was sampled, with the token that was sampled after each."""
        seq, num_accepted = chunk.seq, 0
        seq.is_drafted = False
        for draft, sampled in zip(chunk.drafts, followed, strict=True):
            if seq.finish_reason is not None or seq.token_ids[-1] != draft:
                break
            num_accepted += 1
            if seq.pages:
                # The step has computed it. Without its pages, the sequence starts over, or resumes before it.
                seq.num_computed += 1
                seq.num_unapplied += 1
            seq.expect()
            self._take_token(seq, sampled, gain)
        self.counters.drafted_tokens += len(chunk.drafts)
        self.counters.accepted_tokens += num_accepted
        self.counters.computed_tokens += num_accepted
        if chunk.is_predicted:
            gain.num_predicted, gain.num_accepted = len(chunk.drafts), num_accepted

    def _start_follower(self, leader: Sequence, follower: Sequence) -> None:
        """Forks the leader's pages, or queues the follower, which later finds the prompt in the prefix cache."""
        if len(self.running) < self.limits.max_batch_seqs and self.kv.fork(leader, follower):
            insort(self.running, follower, key=_rank)
        else:
            insort(self.waiting, follower, key=_rank)

    @property
    def _is_shared(self) -> bool:
        return len(self._tenants) > 1

    def _admit_newcomers(self, chunks: list[Chunk], budgets: dict[bool, int]) -> None:
        """Admits tenants with nothing in the batch, in a step of their own, so that their first tokens wait for nobody
        else's work. Never twice in a row: the others must make progress however many arrive.
        """
        if self._for_newcomers or not self._keeps_kv or not self.running:
            return
        seated = {seq.request.tenant for seq in self.running}
        least = self.running[0].request.priority
        newcomers = [s for s in self.waiting if s.request.tenant not in seated and s.request.priority <= least]
        if newcomers:
            self._admit(newcomers, chunks, budgets)

    def _fill_step(self, chunks: list[Chunk], budgets: dict[bool, int]) -> None:
        """Adds running sequences to the step, then waiting ones that fit."""
        preempted = self.counters.preemptions
        # Decoding sequences come first: they are cheap, and their readers wait for each token. Only these may need more
        # pages, and the victims of preemption rank behind them, so no victim is in the step yet.
        decoding: list[Sequence] = []
        reading: list[Sequence] = []
        for seq in self.running:
            wanted = len(seq.token_ids) - seq.num_computed
            (reading if wanted > 1 + seq.num_forced else decoding).append(seq)
        self._add_running(decoding, chunks, budgets, {})
        self._add_running(reading, chunks, budgets, self._parts(reading, budgets))
        if self.waiting and self.counters.preemptions == preempted:
            self._admit(self.waiting, chunks, budgets)

    def _add_running(
        self, seqs: Iterable[Sequence], chunks: list[Chunk], budgets: dict[bool, int], parts: dict[str, int]
    ) -> None:
        """Adds running sequences to the step; if `parts` is not empty, each tenant within its part of the budget."""
        page_size = self.kv.page_size
        for seq in seqs:
            kind = self._kind(seq)
            budget = min(budgets[kind], parts[seq.request.tenant]) if parts else budgets[kind]
            if budget <= 0 or not seq.pages or not seq.runnable:
                continue
            if len(seq.token_ids) <= page_size * len(seq.pages) or self._extend(seq):
                cost = self._add_chunk(chunks, seq, budget)
                budgets[kind] -= cost
                if parts:
                    parts[seq.request.tenant] -= cost

    def _parts(self, reading: Iterable[Sequence], budgets: dict[bool, int]) -> dict[str, int]:
        """Each tenant's part of the budget for prefill, so that one's long prompt does not hold up the others'."""
        if not self._is_shared or not self._keeps_kv:
            return {}
        wanted: Counter[str] = Counter()
        for seq in reading:
            wanted[seq.request.tenant] += seq.num_to_compute
        if self.waiting and (seats := self.limits.max_batch_seqs - len(self.running)):
            for seq in next_in_line(self.waiting, Holdings(self.running).seats, min(seats, len(self._tenants))):
                wanted[seq.request.tenant] += seq.num_to_compute
        return divide(max(1, budgets[False]), wanted)

    def _make_way(self) -> None:
        """Makes room for the next sequence of the tenant with the fewest seats. If it has less than its share, and no
        seat or too few pages are free, tenants with more than theirs lose their lowest-ranked sequences.
        """
        holdings = Holdings(self.running)
        [seq] = next_in_line(self.waiting, holdings.seats, 1)
        tenant, needed = seq.request.tenant, self.kv.pages_for(seq.num_tokens)
        most_seats = max(1, self.limits.max_batch_seqs // len(self._tenants))
        most_pages = self.kv.num_pages // len(self._tenants)
        fits_share = holdings.seats[tenant] < most_seats and holdings.pages[tenant] + needed <= most_pages
        if seq.num_pending or seq.id in self._fetching or (holdings.seats[tenant] and not fits_share):
            return
        # Neither the highest-ranked sequence nor a tenant's only one is preempted: every tenant makes progress.
        for victim in self.running[:0:-1]:
            if len(self.running) < self.limits.max_batch_seqs and self._has_room(needed):
                return
            owner = victim.request.tenant
            has_more = holdings.seats[owner] > most_seats or holdings.pages[owner] > most_pages
            if has_more and holdings.seats[owner] > 1 and owner != tenant and victim.rank[0] >= seq.rank[0]:
                holdings.lose(victim, len(victim.pages))
                self._preempt(victim)

    def _has_room(self, num_pages: int) -> bool:
        return num_pages + len(self.running) <= self.kv.available

    def _budgets(self) -> dict[bool, int]:
        """The token budget of each kind of work at hand."""
        if self._keeps_kv:
            return {False: self.limits.max_batch_tokens}
        kinds = {self._kind(seq) for seq in (*self.running, *self.waiting)}
        return {kind: max(1, self.limits.max_batch_tokens // len(kinds)) for kind in kinds}

    def _kind(self, seq: Sequence) -> bool:
        """Which budget the sequence uses. Without a KV cache, scored prompts have one of their own: True."""
        return not self._keeps_kv and seq.is_scored

    def _add_chunk(self, chunks: list[Chunk], seq: Sequence, budget: int) -> int:
        """Lets a sequence catch up as far as the budget allows. Returns how much of it that uses."""
        start = seq.num_computed
        wanted = len(seq.token_ids) - start
        # A single token takes the short way, unless a state may be captured behind it: at the end of a page.
        is_single = wanted == 1 and self._keeps_kv and not seq.scores
        if is_single and not (self._keeps_states and not (start + 1) % self.kv.page_size):
            chunks.append(Chunk(seq, start, 1, self._samplers(seq, start + 1)))
            return 1
        if not self._keeps_kv:
            end = _reach(seq, budget)
        else:
            end = start + (1 if wanted == 1 else min(wanted, self._affordable(start, budget)))
        scored = range(max(start, seq.next_scored), min(end, seq.scores.stop))
        captures = self.kv.capture(seq, start, end) if self._keeps_states else ()
        chunk = Chunk(seq, start, end - start, self._samplers(seq, end), scored, captures=captures)
        chunks.append(chunk)
        if not self._keeps_kv:
            return chunk.recomputed
        # A chunk that stops short of the end has used up the budget.
        return wanted if chunk.length == wanted else budget

    def _add_drafts(self, speculation: Speculation, chunks: list[Chunk], budget: int) -> None:
        """Lets sequences draft with what the step leaves of the budget. Drafts never delay a prompt or take a page from
        another sequence.
        """
        most = min(budget, self._max_sampled - len(chunks))
        # While prompts are computed, rows are not cheap, and decoding sequences already wait for the step.
        if most <= 0 or any(chunk.length > 1 + chunk.seq.num_forced for chunk in chunks):
            return
        asking = {chunk.seq.id: at for at, chunk in enumerate(chunks) if _can_verify(chunk)}
        rooms = [(seq, seq.max_len - seq.num_tokens - 1) for seq in (chunks[at].seq for at in asking.values())]
        for id, drafts in speculation.draft(rooms, len(chunks), most).items():
            chunk = chunks[asking[id]]
            masks = () if chunk.seq.matcher is None else tuple(chunk.seq.masks_along(drafts.token_ids))
            token_ids = drafts.token_ids if chunk.seq.matcher is None else drafts.token_ids[: len(masks)]
            if token_ids and self._extend_to_spare(chunk.seq, chunk.end + len(token_ids)):
                chunks[asking[id]] = msgspec.structs.replace(
                    chunk, drafts=token_ids, draft_masks=masks, is_predicted=drafts.is_predicted
                )

    def _waits_to_draft(self, speculation: Speculation, budget: int) -> bool:
        """Whether to let the step in flight end first, because drafts can only follow known tokens. Prompts never wait
        for that. Decoding sequences wait together: otherwise those with drafts would take turns with the others.
        """
        if not self._under_way or self.waiting:
            return False
        if any(seq.is_drafted for seq in self.running):
            return True
        seqs = [seq for seq in self.running if seq.runnable]
        if not seqs or any(seq.num_to_compute > 1 or not seq.num_pending for seq in seqs):
            return False
        most = min(budget, self._max_sampled) - len(seqs)
        return most > 0 and speculation.waits(
            [(seq, seq.max_len - seq.num_tokens - 1) for seq in seqs], len(seqs), most
        )

    def _affordable(self, start: int, budget: int) -> int:
        """How many tokens from `start` on the budget covers, at least one."""
        return max(1, int(budget / (1 + self._context_price * start)))

    def _samplers(self, seq: Sequence, end: int) -> tuple[Sequence, ...]:
        num_tokens = len(seq.token_ids)
        if end < num_tokens or num_tokens >= seq.max_len:
            return ()
        followers = self._followers.get(seq.id)
        return (seq,) if followers is None else (seq, *followers)

    def _extend(self, seq: Sequence) -> bool:
        """Ensures pages for all tokens of a running sequence, preempting lower ranks. False if it was preempted itself,
        or if it ranks highest and has to wait for pages that are being fetched.
        """
        while not self.kv.extend(seq, seq.num_tokens):
            victim = self.running[-1]
            if victim is self.running[0] and self.kv.is_moving:
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _extend_to_spare(self, seq: Sequence, num_tokens: int) -> bool:
        """Ensures pages for `num_tokens` tokens, unless that could leave a running sequence short of one."""
        needed = self.kv.pages_for(num_tokens) - len(seq.pages)
        return needed <= 0 or (self._has_room(needed) and self.kv.extend(seq, num_tokens))

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        self.preempted.append(seq.request.id)
        self.running.remove(seq)
        self.kv.park(seq)
        insort(self.waiting, seq, key=_rank)

    def _admit(self, waiting: list[Sequence], chunks: list[Chunk], budgets: dict[bool, int]) -> None:
        """Adds waiting sequences to the step, in order, while there is budget and room."""
        filling = set() if self._keeps_states else {self.kv.next_page(chunk.seq, chunk.end) for chunk in chunks}
        # A sequence that waits for a page to be cached keeps its seat, so that those behind it do not fill the batch.
        seats = self.limits.max_batch_seqs - len(self.running)
        line = waiting[:seats]
        if self._is_shared:
            line = next_in_line(waiting, Holdings(self.running).seats, seats)
        for at, seq in enumerate(line):
            if not any(budget > 0 for budget in budgets.values()):
                self._fetch_ahead(line[at:])
                break
            kind = self._kind(seq)
            if seq.num_pending or budgets[kind] <= 0:
                continue
            admission = self._seat(seq, filling)
            if admission is Admission.NO_ROOM:
                break
            if admission is Admission.FETCHING:
                self._fetching.add(seq.id)
                if self.preempted:
                    # Others were preempted to make room for it: they must not take the room back at once.
                    break
            if admission is Admission.GRANTED:
                budgets[kind] -= self._add_chunk(chunks, seq, budgets[kind])
                if not self._keeps_states:
                    filling.add(self.kv.next_page(seq, chunks[-1].end))

    def _fetch_ahead(self, seqs: Iterable[Sequence]) -> None:
        """Fetches what sequences will find in lower tiers when it is their turn, as far as all of them fit."""
        if self._tiers is None or self._tiers.is_empty:
            return
        if self._looked_after != self.kv.num_evicted:
            self._looked_after = self.kv.num_evicted
            self._looked_ahead.clear()
        spare, looks = len(self.running), 0
        for seq in seqs:
            if seq.id not in self._looked_ahead:
                if looks == _MOST_LOOKS or not self.kv.fetch_ahead(seq, hit_limit=_hit_limit(seq), spare=spare):
                    break
                self._looked_ahead.add(seq.id)
                looks += 1
            spare += self.kv.pages_for(seq.num_tokens)

    def _seat(self, seq: Sequence, filling: set[PageName | None]) -> Admission:
        # Spare a page for each running sequence, so that the new one does not cause a preemption right away.
        admission = self.kv.admit(seq, hit_limit=_hit_limit(seq), spare=len(self.running), filling=filling)
        if admission is not Admission.GRANTED:
            return admission
        self.waiting.remove(seq)
        self._looked_ahead.discard(seq.id)
        insort(self.running, seq, key=_rank)
        self.counters.resumed += self.kv.has_resumed
        if seq.num_cached is None and seq.num_output == 0:
            seq.num_cached = seq.num_computed
            self.begun.append(seq.request.id)
            self.counters.cache_queries += seq.num_prompt
            self.counters.cache_hits += seq.num_cached
            self.counters.stateless_tokens += self.kv.num_lost(seq)
        return admission

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if seq.pages:
            self.running.remove(seq)
            self.kv.release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
            self._looked_ahead.discard(seq.id)
            self.kv.unpark(seq)
        siblings = self._live[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._live[seq.request.id]
            self._tenants[seq.request.tenant] -= 1
            if not self._tenants[seq.request.tenant]:
                del self._tenants[seq.request.tenant]
        if reason is FinishReason.ABORT:
            self._leave_group(seq, siblings)

    def _leave_group(self, seq: Sequence, siblings: list[Sequence]) -> None:
        """Removes an aborted sequence from the choices that have yet to fork; if it led them, another takes over."""
        heirs = self._followers.pop(seq.id, [])
        if heirs:
            heir, *rest = heirs
            insort(self.waiting, heir, key=_rank)
            if rest:
                self._followers[heir.id] = rest
        for leader in siblings:
            if seq in self._followers.get(leader.id, ()):
                self._followers[leader.id].remove(seq)

    def _sequences(self, request: Request, prototype: Prototype | None) -> list[Sequence]:
        """One sequence per choice, each with a matcher of its own."""
        max_len, seqs = self._admission.longest(request), []
        for choice in range(request.params.n):
            self._next_id += 1
            try:
                matcher = None if prototype is None else prototype.start()
                seqs.append(
                    Sequence(
                        self._next_id,
                        request,
                        choice=choice,
                        max_len=max_len,
                        matcher=matcher,
                        masks_late=self._masks_late,
                    )
                )
            except SequenceFailed as error:
                raise BadRequest(error.message, param="structured") from error
        return seqs


def _can_verify(chunk: Chunk) -> bool:
    """Whether drafts may follow the chunk: its last token must be known, and its sequence the only one to sample.
    Tokens that a structure forces come without sampling.
    """
    seq, constraint = chunk.seq, chunk.seq.request.constraint
    jumps = constraint is not None and constraint.jump_forward
    return chunk.samples == (seq,) and not seq.num_pending and not chunk.scored and not jumps


def _brings_one_token(chunk: Chunk) -> bool:
    """Whether the chunk's only result is one token sampled for its own sequence."""
    if chunk.scored or chunk.drafts or len(chunk.samples) != 1:
        return False
    return not chunk.seq.num_forced and not chunk.seq.unheard_logprobs


def _is_broken(chunk: Chunk, output: StepOutput) -> bool:
    """Whether a log-probability of the chunk is NaN, or its embedding is not finite. Sampling checks its own logits."""
    if chunk.scored and any(map(math.isnan, (each.logprob for each in output.scored[chunk.seq.id]))):
        return True
    return not math.isfinite(sum(output.pooled.get(chunk.seq.id, ())))


def _hit_limit(seq: Sequence) -> int:
    """How many tokens may come from the prefix cache. Not the last: logits need one computed position."""
    return 0 if seq.request.task is Task.EMBED else min(seq.num_tokens - 1, seq.next_scored)


def _reach(seq: Sequence, budget: int) -> int:
    """How far a sequence gets without a KV cache: to its end, unless scored positions use up the budget first."""
    if seq.request.one_pass:
        return seq.num_tokens
    for position in seq.scores:
        budget -= position + 1
        if budget <= 0:
            return position + 1
    return seq.num_tokens


def _rank(seq: Sequence) -> tuple[int, int, int]:
    return seq.rank
