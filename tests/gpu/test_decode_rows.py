"""What is kept of a decode step's rows while they stay the same, and that it follows what changes about them."""

import torch
from scripted_grammar import Automaton

from ostro.backends.cuda.decode_rows import DecodeRows
from ostro.backends.cuda.sampling import Sampler
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.sampling_params import SamplingParams


def sequence(id: int, params: SamplingParams | None = None) -> Sequence:
    request = Request(id=id, prompt_ids=(1, 2, 3), params=params or SamplingParams(max_tokens=8), seed=id)
    return Sequence(id, request, max_len=11)


def sampler() -> Sampler:
    return Sampler(4, 16, torch.device("cpu"))


def test_rows_are_edited_until_their_least_length_is_reached() -> None:
    seq = sequence(1, SamplingParams(max_tokens=8, min_tokens=2))
    rows = DecodeRows([sequence(2), seq])
    assert rows.edited
    seq.expect()
    assert rows.edited
    seq.expect()
    assert not rows.edited


def test_rows_with_a_bias_stay_edited() -> None:
    rows = DecodeRows([sequence(1), sequence(2, SamplingParams(logit_bias={3: 1.0}))])
    assert rows.edited
    assert not DecodeRows([sequence(1)]).edited


def test_rows_know_which_log_probabilities_are_wanted() -> None:
    assert DecodeRows([sequence(1), sequence(2, SamplingParams(logprobs=5))]).asked == {1: 5}


def test_a_mask_is_unknown_while_the_token_before_it_is() -> None:
    request = Request(id=1, prompt_ids=(1,), params=SamplingParams(max_tokens=8), seed=1)
    matcher = Automaton({0: {4: 1}, 1: {5: 1}}).start()
    seq = Sequence(1, request, max_len=9, matcher=matcher, masks_late=True)
    rows = DecodeRows([sequence(2), seq])
    assert rows.masked
    found = [rows.masks_unknown]
    seq.expect()
    found.append(rows.masks_unknown)
    seq.learn(4)
    seq.follow(4)
    found.append(rows.masks_unknown)
    assert found == [False, True, False]


def test_remaining_sequences_keep_their_slots_and_are_not_sent_again() -> None:
    own, seqs = sampler(), [sequence(1), sequence(2)]
    slots, kind = own.slots_for(seqs)
    own.tables.num_output.fill_(5)
    assert own.slots_for(list(seqs)) == (slots, kind)
    assert own.tables.num_output.tolist() == [5] * 4


def test_a_returning_sequence_is_sent_again() -> None:
    own, first, second = sampler(), sequence(1), sequence(2)
    own.slots_for([first, second])
    (kept,), _ = own.slots_for([second])
    own.tables.num_output.fill_(5)
    (new, same), _ = own.slots_for([first, second])
    assert same == kept
    assert own.tables.num_output[[new, same]].tolist() == [0, 5]


def test_the_kind_of_step_follows_the_sequences_in_it() -> None:
    own, plain, cut = sampler(), sequence(1), sequence(2, SamplingParams(top_k=3))
    assert own.slots_for([plain, cut])[1].truncated
    assert not own.slots_for([plain])[1].truncated
