"""Properties of a decode step's sequences that hold as long as the sequences stay the same: computed once, not at every
step.
"""

from ostro.backends.sampling.edits import cuts
from ostro.engine.sequence import Sequence


class DecodeRows:
    """Row i belongs to seqs[i]."""

    def __init__(self, seqs: list[Sequence]) -> None:
        self.seqs = seqs
        self.by_id = {seq.id: row for row, seq in enumerate(seqs)}
        self.asked = asked_logprobs(seqs)
        self._always_edited = any(_always_edited(seq) for seq in seqs)
        self._kept_open = [seq for seq in seqs if seq.request.params.min_tokens]
        self._constrained = [seq for seq in seqs if seq.matcher is not None]

    @property
    def edited(self) -> bool:
        """See `edits`."""
        return self._always_edited or any(seq.stops_banned for seq in self._kept_open)

    @property
    def masked(self) -> bool:
        """Whether some sequence has a mask."""
        return any(seq.mask is not None for seq in self._constrained)

    @property
    def masks_unknown(self) -> bool:
        """See `masks_unknown`."""
        return masks_unknown(self._constrained)


def asked_logprobs(seqs: list[Sequence]) -> dict[int, int]:
    """The rows that want log-probabilities, and how many of the likeliest tokens each lists."""
    return {row: top for row, seq in enumerate(seqs) if (top := seq.request.params.logprobs) is not None}


def edits(seqs: list[Sequence]) -> bool:
    """Whether some sequence needs edits of its logits that only the host can make."""
    return any(_always_edited(seq) or seq.stops_banned for seq in seqs)


def masks_unknown(seqs: list[Sequence]) -> bool:
    """Whether the mask of some sequence depends on a token that is not known yet."""
    return any(seq.matcher is not None and seq.num_pending for seq in seqs)


def _always_edited(seq: Sequence) -> bool:
    return bool(seq.request.params.logit_bias or seq.request.bad_word_ids or cuts(seq))
