"""Per-sequence sampling state on the device: one row per slot. Knows no requests and launches no kernel.

A slot is a sequence's row in these tables while it runs. The host writes a slot when a sequence takes it; after that,
steps read everything here and update `num_output`, `last_token` and `counts` themselves.

    settings     [slots, 8] float64   sharpness, top_k, top_p, min_p, repetition, presence, frequency, key
    num_output   [slots] int32        tokens generated so far, which is the position in the random stream
    last_token   [slots] int32        the token drawn last, the next step's input
    counts       [slots, vocab] int16 only once a sequence uses penalties: 2 * times generated + 1 if in the prompt

All settings of a slot are float64, so that one transfer suffices; the key's 64 bits are reinterpreted.

Counts saturate at 16383. A token occurs that often only in an output longer than that, and by then a penalty of even
0.01 has changed its score by 160: more than the range of a row's logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

COLUMNS = 8
_LARGEST_COUNT = 16383
_TINY = float(np.finfo(np.float32).tiny)

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """Sampling settings of the sequence in `slot`. The ids are only read if it uses penalties."""

    slot: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()

    @property
    def truncates(self) -> bool:
        """Whether it needs the `truncated` variant of a step."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalises(self) -> bool:
        """Whether it needs the `penalties` variant of a step."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SamplerTables:
    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.settings = torch.zeros(num_slots, COLUMNS, dtype=torch.float64, device=device)
        self.num_output = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.counts: Tensor | None = None

    def keep_counts(self) -> Tensor:
        """Token counts, allocated on first use: call it before a step with penalties is captured in a graph."""
        if self.counts is None:
            shape = len(self.settings), self.vocab
            self.counts = torch.zeros(shape, dtype=torch.int16, device=self.settings.device)
        return self.counts

    def admit(self, entries: Sequence[SlotSettings]) -> None:
        """Writes the slots of sequences that start, or restart after preemption. Does not wait for the device."""
        if not entries:
            return
        rows = np.empty((len(entries), COLUMNS + 3))
        for row, entry in zip(rows, entries, strict=True):
            row[: COLUMNS - 1] = _columns(entry, self.vocab)
            row[COLUMNS - 1 : COLUMNS].view(np.int64)[0] = base_key(entry.seed, entry.choice)
            last = entry.output_ids[-1] if entry.output_ids else (entry.prompt_ids[-1] if entry.prompt_ids else 0)
            row[COLUMNS:] = entry.slot, len(entry.output_ids), last
        written = self._sent(rows)
        slots = written[:, COLUMNS].long()
        self.settings[slots] = written[:, :COLUMNS]
        self.num_output[slots] = written[:, COLUMNS + 1].int()
        self.last_token[slots] = written[:, COLUMNS + 2].int()
        for entry in entries:
            if entry.penalises:
                self._count(entry)

    def _count(self, entry: SlotSettings) -> None:
        outputs, times = np.unique(np.array(entry.output_ids, dtype=np.int64), return_counts=True)
        prompt = np.unique(np.array(entry.prompt_ids, dtype=np.int64))
        ids, places = np.unique(np.concatenate((outputs, prompt)), return_inverse=True)
        marks = np.zeros(len(ids), dtype=np.int64)
        marks[places[: len(outputs)]] = 2 * np.minimum(times, _LARGEST_COUNT)
        marks[places[len(outputs) :]] += 1
        counts = self.keep_counts()[entry.slot]
        cells = self._sent(np.stack((ids, marks)))
        counts.zero_()
        counts[cells[0]] = cells[1].to(torch.int16)

    def _sent(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        host = torch.from_numpy(array)
        if self.settings.is_cuda:
            # Copying from pageable memory would wait for all work queued on the device.
            host = host.pin_memory()
        return host.to(self.settings.device, non_blocking=True)


def _columns(entry: SlotSettings, vocab: int) -> tuple[float, ...]:
    # A positive temperature that underflows to zero in fp32 is not greedy: ties for the best are still drawn at random.
    temperature = max(float(np.float32(entry.temperature)), _TINY)
    return (
        math.log2(math.e) / temperature if entry.temperature > 0.0 else 0.0,
        entry.top_k if 0 < entry.top_k < vocab else 0,
        entry.top_p,
        entry.min_p,
        entry.repetition_penalty,
        entry.presence_penalty,
        entry.frequency_penalty,
    )


def base_key(seed: int, choice: int) -> int:
    """The random stream's state before the device mixes in the position: 64 bits, signed."""
    state = 0
    for word in (seed, choice):
        state = _mix(((state ^ (word & _WORD)) + _GOLDEN) & _WORD)
    return state - 2**64 if state >> 63 else state


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
