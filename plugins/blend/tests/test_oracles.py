"""What is blended is what the algorithm says, in float64: the five oracles, and the known faults that they catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from dense_blend import Dense, Probe, Span

from engine import LLM, SamplingParams
from engine.runner.walk import View
from engine_blend import blend
from engine_blend.blend import Blend, rotate
from engine_kit.model_config import read_rope
from engine_kit.rotary import cos_sin_table

SETTINGS: dict[str, Any] = {
    "model": "tiny", "dtype": "float64", "block_size": 4, "max_num_seqs": 4, "max_model_len": 256, "num_kv_pages": 300
}  # fmt: skip
SEPARATOR = " # # "
DOCUMENTS = [
    "Once upon a time there was a little girl named Lily who lived in a big house with her mother and her dog Max.",
    "Tom was a small boy. One day he found a red ball in the park and he was very happy to play with it.",
    "The cat sat on the mat and looked at the bird in the tree. The bird sang and the cat fell asleep in the sun.",
]
QUESTION = "One day the dog"
FIRST = SEPARATOR.join([*DOCUMENTS, QUESTION])
OTHER = SEPARATOR.join([DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1], QUESTION])
NEW = SEPARATOR.join([DOCUMENTS[2], "A bear came out of the wood.", DOCUMENTS[0], QUESTION])
"""A text between two chunks that nobody has seen."""
BEHIND_A_PREFIX = SEPARATOR.join([DOCUMENTS[0], "", DOCUMENTS[2], DOCUMENTS[1], QUESTION])
"""The first document is the cached prefix."""
ONE = SamplingParams(temperature=0.0, max_tokens=1)


class Engine:
    """An engine, what it computed, and the same model without it."""

    def __init__(self, ratio: float, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.probe = Probe()
        self.probe.add(patch)
        options = {"evictor": {"ratio": ratio, **settings.pop("options", {})}}
        self.llm = LLM(**{**SETTINGS, **settings}, evictor="cacheblend", options=options)
        self.dense = Dense(self.probe.model)
        self.ratio = ratio

    def hidden(self, prompt: str) -> torch.Tensor:
        """Of the prompt's last token."""
        self.probe.hidden.clear()
        self.llm.generate([prompt], ONE, use_tqdm=False)
        (found,) = self.probe.hidden.values()
        return found

    def tokens(self, text: str) -> list[int]:
        return self.llm.get_tokenizer().encode(text)  # type: ignore[no-any-return]

    def full(self, prompt: str) -> torch.Tensor:
        """What full prefill gives."""
        return self.dense.full(self.tokens(prompt))[0][-1]

    def blended(self, prompt: str) -> torch.Tensor:
        """What the algorithm gives, behind FIRST."""
        first, tokens = self.tokens(FIRST), self.tokens(prompt)
        cached = self.probe.plans[-1]
        assert cached.reuse is not None
        new = (cached.num_computed[cached.reuse.row] + cached.reuse.place).tolist()
        spans = [Span(n, n + 1, first, old) for n, old in zip(new, cached.reuse.position.tolist(), strict=True)]
        assert all(tokens[span.start] == first[span.position] for span in spans)
        return self.dense.blend(tokens, joined(spans), self.ratio)


def joined(spans: list[Span]) -> list[Span]:
    """Neighbours that are one span."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and last.end == span.start and span.position - last.position == span.start - last.start:
            found[-1] = last._replace(end=span.end)
        else:
            found.append(span)
    return found


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def made(ratio: float, **settings: Any) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            engines.append(Engine(ratio, patch, **settings))
        return engines[-1]

    yield made
    for engine in engines:
        engine.llm.shutdown()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# -- the oracles -------------------------------------------------------------------------------------------------------
def exact_mask_reference(make: Callable[..., Engine], **settings: Any) -> None:
    """In another order, around a text that is new, and behind a cached prefix."""
    engine = make(0.15, **settings)
    close(engine.hidden(FIRST), engine.full(FIRST))
    for prompt in (OTHER, NEW, BEHIND_A_PREFIX):
        found = engine.hidden(prompt)
        assert len(engine.probe.plans) > 0
        close(found, engine.blended(prompt))
        engine.probe.plans.clear()


def test_an_exact_mask_reference(make: Callable[..., Engine]) -> None:
    exact_mask_reference(make)


def test_scaled_rotary_positions(make: Callable[..., Engine], scaled: str) -> None:
    exact_mask_reference(make, model=scaled)


def test_all_of_it_recomputed_is_full_prefill(make: Callable[..., Engine]) -> None:
    engine = make(1.0)
    engine.hidden(FIRST)
    close(engine.hidden(OTHER), engine.full(OTHER))
    assert engine.probe.plans


def test_a_chunk_at_its_own_place_is_a_prefix_hit(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is recomputed, and the tokens before it are the same: so are its keys and values."""
    engine = make(0.0)
    kv = engine.llm.llm_engine.client.core.scheduler.kv  # type: ignore[attr-defined]
    expected = engine.hidden(FIRST)
    match = kv.match
    monkeypatch.setattr(kv, "match", lambda sequence, most, *more: match(sequence, 0, *more))
    close(engine.hidden(FIRST), expected)
    (plan,) = engine.probe.plans
    assert plan.reuse is not None and (plan.reuse.position == plan.reuse.place).all()


def test_codes_are_of_keys_that_nothing_else_has_rounded(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 over a cache of 8 bits: a moved key is off by half a step, and a value by nothing."""
    engine = make(0.0, dtype="bfloat16", kv_cache_dtype="int8")
    right, layers = Blend.before, []

    def before(self: Blend, layer: int, view: Any) -> None:
        right(self, layer, view)
        if layer > self._check and (reused := self._reused) is not None:
            (site,) = self._sites[layer]
            keys, values = view.read(site, reused.source)
            keys, found = rotate(keys, self._tables[layer], reused.old, reused.new), view.read(site, reused.destination)
            steps = keys.abs().amax(-1, keepdim=True) / 127
            assert ((found[0] - keys).abs() <= 0.51 * steps).all() and torch.equal(found[1], values)
            layers.append(layer)

    monkeypatch.setattr(Blend, "before", before)
    engine.hidden(FIRST)
    engine.hidden(OTHER)
    assert layers


SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip


def table_of(scaling: dict[str, Any] | None, **more: Any) -> torch.Tensor:
    config = {"max_position_embeddings": 512, "rope_theta": 10000.0, "rope_scaling": scaling, **more}
    return cos_sin_table(read_rope(config, 64), 512, torch.float64)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_keys_are_as_if_rotated_afresh(name: str, partial: float) -> None:
    """Whatever the scaling, and where a part of each head is rotated only."""
    table = table_of(SCALINGS[name], partial_rotary_factor=partial)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(40, 2, 64, dtype=torch.float64, generator=generator)
    old, new = (torch.randint(0, 512, (40,), generator=generator) for _ in range(2))
    at = [rotated(keys, table[places]) for places in (old, new)]
    torch.testing.assert_close(rotate(at[0], table, old, new), at[1], rtol=1e-12, atol=1e-12)
    assert torch.equal(rotate(at[0], table, old, old), at[0])
    latent = rotate(at[0][:, 0], table, old, new)
    torch.testing.assert_close(latent, at[1][:, 0], rtol=1e-12, atol=1e-12)


def rotated(keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Pair by pair, as complex numbers."""
    half = rows.shape[1] // 2
    turned = torch.complex(keys[..., :half], keys[..., half : 2 * half])
    turned *= torch.complex(rows[:, :half], rows[:, half:])[:, None]
    return torch.cat((turned.real, turned.imag, keys[..., 2 * half :]), -1)


def test_divergence_falls_as_the_ratio_grows(make: Callable[..., Engine]) -> None:
    """On the average of all orders."""
    prompts = [SEPARATOR.join([*order, QUESTION]) for order in permutations(DOCUMENTS)][1:]
    distances = []
    for ratio in (0.0, 0.15, 0.5, 1.0):
        engine = make(ratio)
        engine.hidden(FIRST)
        distances.append(sum(float((engine.hidden(prompt) - engine.full(prompt)).norm()) for prompt in prompts))
    print(distances)
    assert distances[0] > distances[1] > distances[2] > distances[3] and distances[3] < 1e-8


# -- known faults of public implementations ----------------------------------------------------------------------------
def mask_leak(patch: pytest.MonkeyPatch) -> None:
    """Queries that were selected count as their row's last keys."""
    right = View._narrowed

    def narrowed(self: View, batch: Any, tokens: torch.Tensor, places: np.ndarray) -> Any:
        made = right(self, batch, tokens, places)
        counts = made.query_start_loc.diff()
        ends = torch.repeat_interleave(made.seq_lens - made.query_start_loc[1:], counts)
        made.kv_index = ends + torch.arange(len(tokens))
        return made

    patch.setattr(View, "_narrowed", narrowed)


def offset_behind_a_prefix(patch: pytest.MonkeyPatch) -> None:
    """Positions in the prompt are taken for places in the step, which begins behind the cached prefix."""
    right = Blend._kept

    def kept(self: Blend, plan: Any, token: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        shifted = (token + plan.num_computed[plan.reuse.row]) % plan.total_tokens
        return right(self, plan, shifted, deviation)

    patch.setattr(Blend, "_kept", kept)


def starvation(patch: pytest.MonkeyPatch) -> None:
    """Tokens that are not cached compete with those that are."""
    right = Blend._kept

    def kept(self: Blend, plan: Any, token: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        made = right(self, plan, token, deviation)
        uncached = np.setdiff1d(np.arange(plan.total_tokens - 1), token)
        made[uncached[: len(uncached) // 2]] = False
        return made

    patch.setattr(Blend, "_kept", kept)


def table_without_scaling(patch: pytest.MonkeyPatch) -> None:
    """A table is made anew, of theta alone."""
    right = blend._tables
    fresh = cos_sin_table(read_rope({"max_position_embeddings": 256, "rope_theta": 10000.0}, 64), 256, torch.float64)
    patch.setattr(blend, "_tables", lambda *args: [fresh for _ in right(*args)])


def not_rotated(patch: pytest.MonkeyPatch) -> None:
    """Keys stay as they were."""
    patch.setattr(blend, "rotate", lambda keys, table, old, new: keys)


@pytest.mark.parametrize("mutant", [mask_leak, offset_behind_a_prefix, starvation, table_without_scaling, not_rotated])
def test_known_faults_are_caught(
    make: Callable[..., Engine], scaled: str, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """By the reference at ratio 0.15; at ratio 1 a leak is not seen."""
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            exact_mask_reference(make, model=scaled)
