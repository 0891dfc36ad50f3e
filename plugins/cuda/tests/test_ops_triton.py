"""The operations in Triton where the suite of engine-sdk does not reach: rows of many blocks, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from engine.interfaces.ops import StepInputs, StepTables
from engine_cuda.interpreter import interpreted
from engine_cuda.ops_triton.body import TritonOpsBody
from engine_cuda.ops_triton.candidates import CAPACITY
from engine_cuda.ops_triton.inputs import ENTRIES, TOKENS
from engine_cuda.ops_triton.logits import TOKENS as COUNTED
from engine_cuda.ops_triton.philox import random_bits, share_of
from engine_kit.philox import uniform
from engine_sdk.conformance.ops.definition import SLACK, Setting, penalise, reject, rows_of, sample

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]


@pytest.fixture
def ops() -> TritonOpsBody:
    return TritonOpsBody(None)


@triton.jit
def _bits(seeds, positions, bits, shares, purpose):
    index = tl.program_id(0)
    drawn = random_bits(tl.load(seeds + index), tl.load(positions + index), purpose)
    tl.store(bits + index, drawn.to(tl.int64))
    tl.store(shares + index, share_of(tl.load(shares + index), drawn))


@pytest.mark.parametrize("purpose", [0, 2])
def test_random_bits_are_the_published_ones(purpose: int) -> None:
    """Bit by bit, and so is the share of a whole number that they stand for."""
    random = np.random.default_rng(purpose)
    seeds = np.array([0, 2**64 - 1, 2**63, *random.integers(0, 2**63, 9)], np.uint64)
    positions = np.array([0, 2**32 - 1, 131_071, *random.integers(0, 2**31, 9)])
    totals = [1, 2**62 - 1, 12345, *random.integers(1, 2**62, 9).tolist()]
    bits, shares = torch.zeros(12, dtype=torch.int64, device=DEVICE), torch.tensor(totals, device=DEVICE)
    tensors = (torch.from_numpy(x).to(DEVICE) for x in (seeds.view(np.int64), positions))
    _bits[(12,)](*tensors, bits, shares, purpose)
    expected = [int(u * 2**53) for u in uniform(seeds, positions, purpose)]
    assert bits.tolist() == expected
    assert shares.tolist() == [b * total >> 53 for b, total in zip(expected, totals, strict=True)]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(0.8, 50, 0.9), id="top_k", marks=pytest.mark.slow),
        pytest.param(Setting(top_k=9000), id="large_top_k"),
        pytest.param(Setting(0.0), id="greedy"),
        pytest.param(Setting(), id="plain", marks=pytest.mark.slow),
        pytest.param(Setting(top_p=0.9), id="top_p", marks=pytest.mark.slow),
        pytest.param(Setting(0.1, min_p=1e-6), id="min_p", marks=pytest.mark.slow),
    ],
)
def test_rows_of_many_blocks(ops: TritonOpsBody, setting: Setting) -> None:
    """A flat row, of which more pass the filters than are collected, and a steep one. Each takes the interpreter
    seconds; the slow ones filter otherwise, which the suite's rows of one block show, and are divided as these are."""
    vocab, random = CAPACITY + 1500, np.random.default_rng(0)
    logits = random.normal(size=(2, vocab)).astype(np.float32) * np.array([[0.3], [4.0]], np.float32)
    given, rows = torch.from_numpy(logits).to(DEVICE), rows_of([setting] * 2, [7, 8], [1, 2], DEVICE)
    for row, token in enumerate(ops.sample(given, rows).tolist()):
        assert token in sample(logits[row], setting, 7 + row, 1 + row, SLACK["float32"])
    drafts = torch.tensor([17, int(logits[1].argmax())], dtype=torch.int32, device=DEVICE)
    for row, token in enumerate(ops.reject(given, rows, drafts, None).tolist()):
        assert token in reject(logits[row], setting, 7 + row, 1 + row, int(drafts[row]), None, SLACK["float32"])


EACH_SETTING = [
    Setting(0.0), Setting(), Setting(0.7, top_k=3), Setting(top_p=0.5), Setting(1.3, min_p=0.2),
    Setting(0.9, 20, 0.9, 0.01),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 6))])
def test_a_draw_from_the_models_own_logits(ops: TritonOpsBody, turn: int, dtype: str) -> None:
    """Bit by bit what is drawn from a checked copy in float32, of which the definition in float64 says what it may be:
    each setting with logits of each kind, a kind each turn, and two rows with a NaN at either end."""
    vocab, random = 1500, np.random.default_rng(turn)
    normal = random.normal(size=vocab)
    kinds = [
        normal * 2, random.integers(-2, 3, vocab), np.full(vocab, 3.0), np.where(normal > 2, normal, -np.inf),
        np.where(np.arange(vocab) == 1200, 0.0, -np.inf), normal * 1e4,
    ]  # fmt: skip
    settings = [*EACH_SETTING, Setting(0.0), Setting()]
    count, of_rows = len(settings), [kinds[(row + turn) % len(kinds)] for row in range(len(settings))]
    given = torch.from_numpy(np.stack(of_rows)).to(getattr(torch, dtype)).to(DEVICE)
    given[-2, 0] = given[-1, -1] = torch.nan
    rows = rows_of(settings, list(range(count)), [3 * row for row in range(count)], DEVICE)
    wide, checked = ops.check_logits(given)
    tokens, broken = ops.draw(given, rows)
    assert broken.tolist() == checked.tolist() == [False] * (count - 2) + [True] * 2
    assert tokens.tolist() == ops.sample(wide, rows).tolist()
    for row, token in enumerate(tokens[:-2].tolist()):
        exact = given[row].double().cpu().numpy()
        assert token in sample(exact, settings[row], row, 3 * row, SLACK["float32"]), settings[row]


def test_log_probabilities_of_many_blocks(ops: TritonOpsBody) -> None:
    """Equal logits in several blocks come in the order of their tokens; what is -inf comes last."""
    vocab, k = 5000, 12
    logits = torch.full((2, vocab), -torch.inf, device=DEVICE)
    logits[0, [4999, 3, 1030, 1025, 40]] = torch.tensor([2.0, 2.0, 2.0, 1.0, 3.0], device=DEVICE)
    logits[1] = torch.linspace(-30, 5, vocab, device=DEVICE).roll(777)
    tokens = torch.tensor([1025, 0], dtype=torch.int32, device=DEVICE)
    chosen, rank, ids, values = ops.logprobs(logits, tokens, k)
    exact = torch.log_softmax(logits.double(), dim=-1).cpu()
    torch.testing.assert_close(chosen.cpu().double(), exact[[0, 1], tokens.long().cpu()], rtol=1e-5, atol=1e-5)
    assert rank.tolist() == [5, int((exact[1] > exact[1, 0]).sum()) + 1]
    assert ids[0, :5].tolist() == [40, 3, 1030, 4999, 1025] and len(set(ids[0].tolist())) == k
    assert values[0, 5:].isneginf().all()
    assert ids[1].tolist() == exact[1].topk(k).indices.tolist()


def test_penalties_of_long_rows(ops: TritonOpsBody) -> None:
    """A token that stands in the range of several programs is counted by all and penalised once."""
    length, vocab, random = 2 * COUNTED + 100, 40, np.random.default_rng(1)
    tokens, prompt = random.integers(0, vocab - 3, (1, length)), COUNTED + 60
    logits = random.normal(size=(2, vocab)).astype(np.float32)
    expected = penalise(logits[1], tokens[0, :prompt], tokens[0, prompt:-9].tolist(), 0.5, 0.01, 1.3)
    given = torch.from_numpy(logits).to(DEVICE)
    columns = [torch.tensor([x], dtype=torch.float32, device=DEVICE) for x in (0.5, 0.01, 1.3)]
    whole = [torch.tensor([x], device=DEVICE) for x in (1, prompt, length - 9)]
    ops.penalties(given, whole[0], torch.from_numpy(tokens).int().to(DEVICE), *whole[1:], *columns)
    np.testing.assert_allclose(given[1].cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(given[0].cpu().numpy(), logits[0])


def test_inputs_of_several_programs(ops: TritonOpsBody) -> None:
    """More tokens, and longer block tables, than one program has."""
    slots, width, lengths = 7, ENTRIES + 50, [1, 1, TOKENS + 3, 2, 5]
    total, rows, random = sum(lengths) + 4, len(lengths), np.random.default_rng(2)
    table = torch.from_numpy(random.integers(1, 999, (slots, width), dtype=np.int32)).to(DEVICE)
    tokens = torch.from_numpy(random.integers(0, 999, (slots, 4 * width), dtype=np.int32)).to(DEVICE)
    computed, slot = [500, 8000, 0, 77, 3], [6, 0, 3, 2, 5]
    ends = np.cumsum([0, *lengths])

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    inputs = StepInputs(
        ints(slot), ints(computed), ints(ends), ints([c + n for c, n in zip(computed, lengths, strict=True)]),
        ints([-1] * total), ints([-1] * total, torch.int64), (torch.zeros_like(table[:rows]),),
        (ints([-1] * total, torch.int64),),
    )  # fmt: skip
    ops.prepare_inputs(StepTables(tokens, (table,), (4,)), inputs)
    places = [(s, c + i) for s, c, n in zip(slot, computed, lengths, strict=True) for i in range(n)]
    padding = [0] * 4
    assert inputs.positions.tolist() == [place for _, place in places] + padding
    assert inputs.token_ids.tolist() == [int(tokens[s, place]) for s, place in places] + padding
    assert inputs.slot_mappings[0].tolist() == [int(table[s, p // 4]) * 4 + p % 4 for s, p in places] + padding
    for row, length in enumerate(inputs.seq_lens.tolist()):
        count = -(-length // 4)
        found, rest = inputs.block_tables[0][row, :count], inputs.block_tables[0][row, count:]
        assert torch.equal(found, table[slot[row], :count]) and not rest.any()
