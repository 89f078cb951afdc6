import pytest
import torch

from ostro.backends.memory import gpu_room, page_bytes
from ostro.errors import BadRequest, ModelError
from ostro.models.architecture import ModelShape

SHAPE = ModelShape(
    vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=512
)
GB = 1 << 30


def pages(
    monkeypatch: pytest.MonkeyPatch,
    *,
    free: int,
    kv_memory: int | None = None,
    utilization: float = 0.9,
    limit: int | None = None,
    max_tokens: int | None = None,
    expert_bytes: int = 0,
    attention_bytes: int = 0,
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10 * GB))
    return gpu_room(
        SHAPE,
        page_size=64,
        itemsize=2,
        kv_memory=kv_memory,
        utilization=utilization,
        max_batch_tokens=1024,
        max_batch_seqs=8,
        limit=limit,
        max_tokens=max_tokens,
        expert_bytes=expert_bytes,
        attention_bytes=attention_bytes,
    ).pages


def test_pages_fill_the_share_of_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    most, less = pages(monkeypatch, free=9 * GB), pages(monkeypatch, free=9 * GB, utilization=0.5)
    each = page_bytes(SHAPE, 64, 2)
    assert 6 * GB < most * each < 8 * GB
    assert (most - less) * each == pytest.approx(4 * GB, rel=0.01)


def test_memory_that_others_use_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages(monkeypatch, free=5 * GB) < pages(monkeypatch, free=9 * GB)


def test_rows_of_experts_leave_fewer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    most, fewer = (pages(monkeypatch, free=9 * GB, expert_bytes=size) for size in (0, 1 << 20))
    # For each of the 1024 tokens.
    assert (most - fewer) * page_bytes(SHAPE, 64, 2) == pytest.approx(1 * GB, rel=0.01)


def test_plain_attention_leaves_fewer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    most, fewer = (pages(monkeypatch, free=9 * GB, attention_bytes=size) for size in (0, GB))
    assert (most - fewer) * page_bytes(SHAPE, 64, 2) == pytest.approx(1 * GB, rel=0.01)


def test_asked_for_memory_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    each = page_bytes(SHAPE, 64, 2)
    # One page beyond those of the scheduler takes what padding writes.
    assert pages(monkeypatch, free=9 * GB, kv_memory=100 * each) == 99
    with pytest.raises(BadRequest, match="are left for it; lower it"):
        pages(monkeypatch, free=9 * GB, kv_memory=9 * GB)


def test_a_share_may_be_limited_and_what_is_asked_for_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    each = page_bytes(SHAPE, 64, 2)
    assert pages(monkeypatch, free=9 * GB, limit=50 * each) == 49
    assert pages(monkeypatch, free=9 * GB, limit=50 * each, kv_memory=100 * each) == 99
    assert pages(monkeypatch, free=9 * GB, limit=90 * GB) == pages(monkeypatch, free=9 * GB)


def test_a_number_of_tokens_bounds_the_pages_whatever_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages(monkeypatch, free=9 * GB, max_tokens=640) == 10
    assert pages(monkeypatch, free=9 * GB, max_tokens=700, kv_memory=1 * GB) == 10
    assert pages(monkeypatch, free=9 * GB, max_tokens=1 << 40) == pages(monkeypatch, free=9 * GB)
    with pytest.raises(BadRequest, match="max_running_tokens must hold at least one page of 64 tokens, got 63"):
        pages(monkeypatch, free=9 * GB, max_tokens=63)


def test_too_little_memory_is_reported_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="raise gpu_memory_utilization"):
        pages(monkeypatch, free=2 * GB)
