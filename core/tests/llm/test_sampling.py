"""`LLM` with what edits, ranks and scores: logit_bias, bad_words, allowed_token_ids, processors added by name, best_of,
prompt_logprobs and beam search, in float64 against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsRows
from engine.types.errors import ConfigError, DriverNotFoundError, InvalidRequestError
from engine.types.plan import NewSlot
from engine_kit.beam_search import BeamSearchParams

PROMPTS = ["Hello, my name is", "Grüße 你好", "x", "The quick brown fox jumps over the lazy dog. " * 2]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
ENDS = list(range(60, 110))
"""Ends of sequence for the beam searches that end."""


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("sampling")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=folder, dtype="float64", max_num_seqs=6, num_kv_pages=300, max_num_batched_tokens=24) as model:
        yield model


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def logprobs(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """[T, V] of a sequence."""

    def score(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return reference(torch.tensor([ids])).logits[0].log_softmax(-1)

    return score


def run(llm: LLM, prompt: Any, **fields: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**{**GREEDY, **fields}), use_tqdm=False)


def one(llm: LLM, prompt: Any, **fields: Any) -> list[int]:
    return run(llm, prompt, **fields)[0].outputs[0].token_ids


# -- edits of logits -------------------------------------------------------------------------------------------------
def test_logit_bias(llm: LLM) -> None:
    free = one(llm, PROMPTS[0])
    assert one(llm, PROMPTS[0], logit_bias={free[0]: -100})[0] != free[0]
    assert one(llm, PROMPTS[0], logit_bias={"7": 100}) == [7] * 12
    assert one(llm, PROMPTS[0], logit_bias={}) == free


def test_allowed_token_ids(llm: LLM) -> None:
    assert set(one(llm, PROMPTS[0], allowed_token_ids=[30, 31, 32], temperature=2.0)) <= {30, 31, 32}
    # With the end allowed too, min_tokens still comes first.
    tokens = one(llm, PROMPTS[0], allowed_token_ids=[30, 256], ignore_eos=False, min_tokens=5, logit_bias={256: 50.0})
    assert tokens == [30] * 5 + [256]


def test_bad_words_never_appear(llm: LLM) -> None:
    """A text that greedy decoding writes is forbidden; what comes instead does not hold it."""
    tokenizer = llm.get_tokenizer()
    free = one(llm, PROMPTS[0], allowed_token_ids=tokenizer.encode("abc de"), max_tokens=40)
    text = tokenizer.decode(free)
    word = next(text[i : i + 3] for i in range(len(text)) if " " not in text[i : i + 3])
    bad = run(
        llm, PROMPTS[0], allowed_token_ids=tokenizer.encode("abc de"), max_tokens=40, bad_words=[word], temperature=0.0
    )
    assert word in text and word not in bad[0].outputs[0].text


def test_each_of_a_batch_gets_its_own(llm: LLM) -> None:
    kinds: list[dict[str, Any]] = [
        {"logit_bias": {3: 4.0, 9: -9.0}, "temperature": 0.8, "seed": 1},
        {"bad_words_token_ids": [[5], [6, 7]], "temperature": 1.3, "seed": 2, "prompt_logprobs": 1},
        {"allowed_token_ids": list(range(40)), "temperature": 1.0, "seed": 3, "n": 2, "best_of": 4},
        {},
    ]
    several = [SamplingParams(**{**GREEDY, **kind}) for kind in kinds]
    together = llm.generate(PROMPTS, several, use_tqdm=False)
    for prompt, params, output in zip(PROMPTS, several, together, strict=True):
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        assert [(c.token_ids, c.cumulative_logprob) for c in alone.outputs] == [
            (c.token_ids, c.cumulative_logprob) for c in output.outputs
        ]
        assert alone.prompt_logprobs == output.prompt_logprobs


# -- processors added by name ----------------------------------------------------------------------------------------
class Shout(LogitsProcessorCard):
    """Only one id is left: the request's argument."""

    extra_args = frozenset({"shout"})
    body = f"{__name__}:ShoutBody"


class ShoutBody:
    def __init__(self, context: Any) -> None:
        self.token = torch.zeros(context.start.max_num_seqs, dtype=torch.int64)

    def enter(self, new: NewSlot) -> None:
        assert new.params.extra_args is not None
        self.token[new.slot] = new.params.extra_args["shout"]

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        row = torch.arange(len(logits)) if rows.row is None else rows.row
        logits[row, self.token[rows.slot]] += 1000


class Whisper(Shout):
    """Claims what `Shout` claims."""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "dist_shout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-shout\nVersion: 1.0\n")
    entries = f"[engine.logits_processor.v0]\nshout = {__name__}:Shout\nmutter = {__name__}:Whisper\n"
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_strangers_processor_by_name(folder: Path, llm: LLM, strangers: None) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args=.*'shout'"):
        run(llm, "x", extra_args={"shout": 5})
    settings: dict[str, Any] = {"model": folder, "dtype": "float64", "num_kv_pages": 50}
    with LLM(**settings, logits_processors="shout") as loud:
        assert one(loud, "x", extra_args={"shout": 5}) == [5] * 12
        assert one(loud, "x", extra_args={"shout": 5}, bad_words_token_ids=[[5, 5]], max_tokens=4)[:2] != [5, 5]
        assert one(loud, PROMPTS[0]) == one(llm, PROMPTS[0])
    with pytest.raises(ConfigError, match="'shout' and 'mutter'.*both take the request's argument 'shout'"):
        LLM(**settings, logits_processors="shout,mutter")
    with pytest.raises(DriverNotFoundError, match="shouts"):
        LLM(**settings, logits_processors="shouts")


# -- best_of ---------------------------------------------------------------------------------------------------------
def test_best_of_returns_the_most_likely(llm: LLM, logprobs: Callable[..., torch.Tensor]) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 5}
    (all_of_them,) = run(llm, PROMPTS[0], n=6, logprobs=0, **params)
    (best,) = run(llm, PROMPTS[0], n=2, best_of=6, **params)
    ranked = sorted(all_of_them.outputs, key=lambda completion: -completion.cumulative_logprob)
    assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best.outputs] == [0, 1] and best.num_discarded_tokens == 20
    ids = best.prompt_token_ids
    for completion in best.outputs:
        rows = logprobs(ids + completion.token_ids)[len(ids) - 1 : -1]
        total = sum(row[token].item() for row, token in zip(rows, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert completion.logprobs is None


# -- prompt_logprobs -------------------------------------------------------------------------------------------------
def test_prompt_logprobs(llm: LLM, logprobs: Callable[..., torch.Tensor]) -> None:
    """Prompts in one or several chunks of 24, the second time with their pages in the cache."""
    for _ in range(2):
        for output in run(llm, PROMPTS, prompt_logprobs=3, n=2, max_tokens=2):
            ids, found = output.prompt_token_ids, output.prompt_logprobs
            assert output.num_cached_tokens == 0 and len(found) == len(ids) and found[0] is None
            expected = logprobs(ids)
            for position in range(1, len(ids)):
                row, entry = expected[position - 1], found[position]
                assert entry[ids[position]].logprob == pytest.approx(row[ids[position]].item(), abs=1e-5)
                best = row.topk(3)
                assert list(dict.fromkeys([ids[position], *best.indices.tolist()])) == list(entry)
                for rank, (token, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
                    assert entry[token].logprob == pytest.approx(value, abs=1e-5) and entry[token].rank == rank + 1


# -- beam search -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [1, 3, 8])
def test_beams_are_those_of_transformers(llm: LLM, reference: Any, width: int) -> None:
    """Without an end of sequence the two definitions agree: sequences, order and scores."""
    hits = llm.llm_engine.stats().prefix_hits
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=10, ignore_eos=True))
    assert llm.llm_engine.stats().prefix_hits > hits, "steps find the steps before"
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        expected = reference.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), num_beams=width, num_return_sequences=width,
            do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert [sequence.tokens for sequence in output.sequences] == expected.sequences.tolist()
        if width > 1:
            scores = [sequence.cum_logprob / 10 for sequence in output.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        for sequence in output.sequences:
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
            assert (sequence.finish_reason, len(sequence.logprobs)) == ("length", 10)


def plain_beams(
    logprobs: Callable[[list[int]], torch.Tensor], prompt: list[int], width: int, steps: int, penalty: float
) -> list[tuple[list[int], float, str]]:
    """vLLM's search over the whole model, a row at a time: (generated tokens, sum, finish reason), best first."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float, str]] = []
    for _ in range(steps):
        candidates = []
        for tokens, total in beams:
            row = logprobs(prompt + tokens)[-1]
            for token in row.argsort(descending=True)[: 2 * width].tolist():
                if token in ENDS:
                    done.append(([*tokens, token], total + row[token].item(), "stop"))
                else:
                    candidates.append(([*tokens, token], total + row[token].item()))
        beams = sorted(candidates, key=lambda entry: -entry[1])[:width]
    done += [(tokens, total, "length") for tokens, total in beams]
    return sorted(done, key=lambda entry: -entry[1] / len(entry[0]) ** penalty)[:width]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0])
def test_beams_that_end(folder: Path, tmp_path: Path, logprobs: Callable[..., torch.Tensor], penalty: float) -> None:
    copy = tmp_path / "ends"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    reasons = set()
    with LLM(model=copy, dtype="float64", max_num_seqs=6, num_kv_pages=300) as llm:
        for kept in (True, False):
            params = BeamSearchParams(
                beam_width=4, max_tokens=7, length_penalty=penalty, include_stop_str_in_output=kept
            )
            for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
                ids = llm.get_tokenizer().encode(prompt)
                expected = plain_beams(logprobs, ids, 4, 7, penalty)
                for sequence, (tokens, total, reason) in zip(output.sequences, expected, strict=True):
                    assert sequence.tokens == ids + (tokens if kept or reason == "length" else tokens[:-1])
                    assert sequence.cum_logprob == pytest.approx(total, abs=1e-4)
                    assert sequence.finish_reason == reason
                    assert sequence.stop_reason == (tokens[-1] if reason == "stop" else None)
                    reasons.add(reason)
    assert "stop" in reasons


def test_beam_search_is_bounded_by_the_model_and_refuses_nonsense(llm: LLM) -> None:
    ids = [5] * 250
    (output,) = llm.beam_search(
        {"prompt_token_ids": ids}, BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    )
    assert [len(sequence.tokens) for sequence in output.sequences] == [256, 256]
    with pytest.raises(InvalidRequestError, match="beam_width=33"):
        llm.beam_search("x", BeamSearchParams(beam_width=33, max_tokens=2))
    with pytest.raises(InvalidRequestError, match="SamplingParams"):
        llm.beam_search("x", SamplingParams())  # type: ignore[arg-type]
    assert llm.beam_search([], BeamSearchParams(beam_width=3, max_tokens=2)) == []


def test_no_tokens_at_all(llm: LLM) -> None:
    """The prompt is computed, however much else is asked; what comes of it is nothing, and who asks next finds it."""
    prompt = "Warm me up before you go, or else I am cold and slow. " * 2
    asked = [
        SamplingParams(max_tokens=0, n=2, best_of=3, logprobs=1, stop=["x"]),
        SamplingParams(max_tokens=0, detokenize=False, prompt_logprobs=0),
    ]
    for output in llm.generate([prompt] * 2, asked, use_tqdm=False):
        assert output.finished and output.error is None
        for completion in output.outputs:
            assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "length")
    (after,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    assert after.num_cached_tokens == len(after.prompt_token_ids) - 1 and len(after.outputs[0].token_ids) == 1
    assert llm.llm_engine.stats().pages_used == 0
