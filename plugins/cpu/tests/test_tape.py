"""The tape: what was recorded runs again on the same memory, in order, and nothing else does."""

from __future__ import annotations

import threading

import pytest
import torch

FLOAT32 = 1


@pytest.fixture
def add(native):
    """out += x, by one native call."""

    def add(out: torch.Tensor, x: torch.Tensor) -> None:
        native.sum("auto", FLOAT32, out.data_ptr(), [out.data_ptr(), x.data_ptr()], out.numel())

    return add


def test_replay_reads_what_lies_there_now(native, add) -> None:
    out, x = torch.zeros(100), torch.ones(100)
    add(out, x)
    with native.Tape() as tape:
        add(out, x)
        add(x, x)
    assert out.eq(2).all() and x.eq(2).all()
    add(out, x)  # not on the tape
    assert len(tape) == 2 and tape.names == ["sum", "sum"]
    x.fill_(5)
    tape.replay()
    assert out.eq(9).all() and x.eq(10).all()
    tape.replay()
    assert out.eq(19).all() and x.eq(20).all()


def test_many_calls(native, add) -> None:
    """More than fit one block of memory, each with a vector of its own to keep and free."""
    out, x = torch.zeros(3), torch.ones(3)
    with native.Tape() as tape:
        for _ in range(5000):
            add(out, x)
    for _ in range(3):
        tape.replay()
    assert len(tape) == 5000 and out.eq(20000).all()


def test_recording_is_of_one_thread(native, add) -> None:
    out, other, x = torch.zeros(10), torch.zeros(10), torch.ones(10)
    with native.Tape() as tape:
        add(out, x)
        thread = threading.Thread(target=add, args=(other, x))
        thread.start()
        thread.join()
    assert len(tape) == 1
    tape.replay()
    assert out.eq(2).all() and other.eq(1).all()


def test_misuse_is_refused(native, add) -> None:
    tape, other = native.Tape(), native.Tape()
    with tape:
        with pytest.raises(RuntimeError, match="a tape records on this thread already"), other:
            pass
        with pytest.raises(RuntimeError, match="still records"):
            tape.replay()
    with pytest.raises(RuntimeError, match="has recorded already"), tape:
        pass
    with other:
        pass
    other.replay()
    assert len(other) == 0


def test_an_error_ends_recording(native, add) -> None:
    """A failing call is not kept, and the next tape records as ever."""
    out, x = torch.zeros(10), torch.ones(10)
    tape = native.Tape()
    with pytest.raises(ValueError, match="no such level|level 'none'"), tape:
        add(out, x)
        native.sum("none", FLOAT32, out.data_ptr(), [x.data_ptr()], 10)
    assert tape.names == ["sum"]
    with native.Tape() as tape:
        add(out, x)
    tape.replay()
    assert out.eq(3).all()


def test_fewer_rows(native) -> None:
    """A replay of some rows computes those, and leaves the others alone."""
    rows, size = 6, 32
    x, out = torch.randn(rows, size), torch.zeros(rows, size)
    weight = torch.ones(size)
    ops = native.Ops("auto", 2)
    with native.Tape(rows) as tape:
        ops.norm(FLOAT32, x.data_ptr(), size, 0, rows, 1, size, weight.data_ptr(), out.data_ptr(), 1e-6)
    expected = out.clone()
    for count in (1, 4, 5, 6, 0):
        out.fill_(7)
        tape.replay(count)
        count = count or rows
        assert torch.equal(out[:count], expected[:count]) and out[count:].eq(7).all()
    with pytest.raises(ValueError, match="fewer rows"):
        tape.replay(rows + 1)


def test_fewer_rows_draw(native) -> None:
    """Inputs from tables, draws and drawn tokens' places are rows too."""
    rows, size, vocab = 5, 4, 40
    slot, computed, starts = (torch.arange(n, dtype=torch.int32) for n in (rows, rows, rows + 1))
    tokens, place = torch.arange(rows * size, dtype=torch.int32).view(rows, size), torch.full((rows,), 3)
    ids, at = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    logits, drawn, told = torch.randn(rows, vocab), *torch.zeros(2, rows, dtype=torch.int32)
    real, whole = torch.zeros(3, rows), torch.zeros(3, rows, dtype=torch.int64)
    computed, broken = computed % 3, torch.zeros(rows, dtype=torch.bool)
    sampling, wide = native.Sampling("auto", 2), slot.long()
    with native.Tape(rows) as tape:
        native.prepare_inputs(
            tokens.data_ptr(), size, rows, rows, slot.data_ptr(), computed.data_ptr(), starts.data_ptr(),
            ids.data_ptr(), at.data_ptr(), [],
        )  # fmt: skip
        sampling.sample(
            FLOAT32, logits.data_ptr(), vocab, rows, vocab, real[0].data_ptr(), whole[0].data_ptr(),
            real[1].data_ptr(), real[2].data_ptr(), whole[1].data_ptr(), whole[2].data_ptr(), drawn.data_ptr(),
            broken.data_ptr(),
        )  # fmt: skip
        native.place_tokens(
            drawn.data_ptr(), broken.data_ptr(), rows, tokens.data_ptr(), size, wide.data_ptr(),
            place.data_ptr(), -1, told.data_ptr(),
        )  # fmt: skip
    assert torch.equal(drawn, logits.argmax(1).int()) and torch.equal(tokens[:, 3], drawn)
    for count in (1, 4, 5):
        logits.copy_(torch.randn(rows, vocab))
        expected = torch.where(torch.arange(rows) < count, logits.argmax(1).int(), 7)
        for out in (ids, drawn, told, tokens[:, 3]):
            out.fill_(7)
        tape.replay(count)
        assert torch.equal(drawn, expected) and torch.equal(told, expected) and torch.equal(tokens[:, 3], expected)
        assert ids[:count].ne(7).all() and ids[count:].eq(7).all()


def test_rows_that_are_none_of_the_step(native) -> None:
    """A number that is no multiple of the tape's rows stands for something else, and stays."""
    x, out, weight = torch.randn(7, 32), torch.zeros(7, 32), torch.ones(32)
    with native.Tape(4) as tape:
        native.Ops("auto", 1).norm(FLOAT32, x.data_ptr(), 32, 0, 7, 1, 32, weight.data_ptr(), out.data_ptr(), 1e-6)
    expected = out.clone()
    out.fill_(7)
    tape.replay(1)
    assert torch.equal(out, expected)
