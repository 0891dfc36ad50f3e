"""Encoder-decoder models through the whole engine beside `transformers.generate`: one row of the table each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, tokenizer
from greedy import BUDGET, NEW_TOKENS, PROMPTS, Answer, compare
from model_table import ENCODER_DECODERS

from engine import LLM, SamplingParams
from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine_kit.beam_search import BeamSearchParams
from engine_kit.encoders import Encoders
from engine_sdk.conformance.model.small import quiet, small_config

MOST = 40
"""Tokens of the longest prompt: a step takes one beside a few tokens of decoders."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(folder: Path, architecture: str) -> list[Answer]:
    """Save a random checkpoint; give transformers' answers of it to each prompt, which its encoder reads, alone."""
    over = {**ENCODER_DECODERS[architecture], "vocab_size": VOCAB_SIZE}
    over[next(key for key in ("n_positions", "max_position_embeddings") if key in over)] = MOST
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    with quiet(), torch.no_grad():
        model = kind(kind.config_class(**small_config(architecture, over))).eval()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") or "relative" in name:
                tensor.normal_(std=0.5)  # transformers starts them at 0 or small, where a mistake would not show
            elif tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5)
            elif "position" not in name:
                tensor.normal_(std=0.2)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, VOCAB_SIZE, (1, n), generator=generator) for n in PROMPTS]
        return [_answer(model, prompt) for prompt in prompts]


def _answer(model: Any, prompt: torch.Tensor) -> Answer:
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return Answer(prompt[0].tolist(), out.sequences[0, -NEW_TOKENS:].tolist(), torch.cat(out.logits))


def engine(folder: Path, **settings: Any) -> LLM:
    common = {"max_num_batched_tokens": MOST + BUDGET, "max_num_seqs": 4, "num_kv_pages": 4}
    return LLM(model=str(folder), dtype="float32", block_size=4, **{**common, **settings})


def ask(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("architecture", ENCODER_DECODERS)
def test_greedy(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, four at a time, preempted: three pages hold the tokens of a decoder and a half. Each comes twice, and
    is encoded once where both are there."""
    answers, made = make(tmp_path, architecture), []
    plain, twice = Encoders.__init__, [answer for answer in answers for _ in range(2)]
    monkeypatch.setattr(Encoders, "__init__", lambda self, *given: (made.append(self), plain(self, *given))[1])
    llm = engine(tmp_path)
    try:
        outputs = ask(llm, [answer.prompt for answer in twice])
        preempted = llm.llm_engine.stats().num_preemptions
    finally:
        llm.shutdown()
    assert sum(compare(one, out) for one, out in zip(twice, outputs, strict=True)) <= 1
    assert preempted, "nothing was preempted"
    assert made[-1].num_encoded < 2 * len(answers), "each input was encoded for each request"


ONE = "BartForConditionalGeneration"
"""What is not the model's own is tried with one."""


def test_prompts_of_decoders(tmp_path: Path) -> None:
    """They go on from any tokens, in chunks as at once, and are found in the cache under the same input to the encoder
    alone (the first token of another prompt is). The model's first token is put before those that lack it."""
    answers = make(tmp_path, ONE)
    prompts = [[2, *range(20 + 9 * i, 31 + 9 * i)] for i in range(len(answers))]

    def asked(source: int, tokens: int) -> dict[str, Any]:
        return {"encoder_prompt": {"prompt_token_ids": answers[source].prompt}, "decoder_prompt": prompts[tokens]}

    every = [asked(i, i) for i in range(len(answers))]
    found = []
    for settings in ({}, {"long_prefill_token_threshold": 3}):
        llm = engine(tmp_path, num_kv_pages=60, **settings)
        try:
            found.append(ask(llm, every))
            again = llm.generate([asked(0, 0), asked(1, 0)], GREEDY, use_tqdm=False)
            (bare,) = llm.generate([{**asked(0, 0), "decoder_prompt": prompts[0][1:]}], GREEDY, use_tqdm=False)
        finally:
            llm.shutdown()
        assert [output.num_cached_tokens for output in again] == [11, 1] and bare.prompt_token_ids == prompts[0]
        assert [again[0].outputs[0].token_ids, bare.outputs[0].token_ids] == [found[-1][0].token_ids] * 2
    for whole, cut in zip(*found, strict=True):
        assert whole.cumulative_logprob == pytest.approx(cut.cumulative_logprob, abs=1e-3)


def test_samples_and_beams_share_an_input(tmp_path: Path) -> None:
    """Beams are asked for step by step, with the encoder's input of the first; the best of one beam is greedy."""
    answers = make(tmp_path, ONE)
    llm = engine(tmp_path, num_kv_pages=60)
    try:
        params = SamplingParams(n=3, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        (three,) = llm.generate([answers[0].prompt], params, use_tqdm=False)
        beams = llm.beam_search(
            [answers[0].prompt], BeamSearchParams(beam_width=1, max_tokens=NEW_TOKENS, ignore_eos=True)
        )
    finally:
        llm.shutdown()
    assert {tuple(output.token_ids) for output in three.outputs} == {tuple(answers[0].tokens)}
    assert beams[0].sequences[0].tokens == [2, *answers[0].tokens]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_bad_words_of_the_model(file: str, tmp_path: Path) -> None:
    """Marian's checkpoints keep their padding out by them: whoever asks, and however."""
    answers = make(tmp_path, "MarianMTModel")
    bad = sorted({token for answer in answers for token in answer.tokens})[:20]
    model = transformers.MarianMTModel.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.bad_words_ids = words = [[token] for token in bad]
    expected = [_answer(model, torch.tensor([answer.prompt])) for answer in answers]
    assert not {token for answer in expected for token in answer.tokens} & set(bad)
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "bad_words_ids": words}))
    llm = engine(tmp_path, num_kv_pages=60)
    try:
        outputs = ask(llm, [answer.prompt for answer in answers], msgspec.structs.replace(GREEDY, logprobs=None))
    finally:
        llm.shutdown()
    assert [list(output.token_ids) for output in outputs] == [answer.tokens for answer in expected]


def test_drafts(tmp_path: Path) -> None:
    """Of an n-gram drafter, which looks at the decoder's tokens alone: they repeat themselves."""
    answers = make(tmp_path, ONE)
    llm = engine(tmp_path, num_kv_pages=60, drafter="ngram")
    try:
        outputs = ask(llm, [answer.prompt for answer in answers])
    finally:
        llm.shutdown()
    assert sum(compare(one, out) for one, out in zip(answers, outputs, strict=True)) <= 1


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    make(tmp_path, ONE)
    llm = engine(tmp_path, num_kv_pages=60)
    ids = {"prompt_token_ids": [5, 6]}
    try:
        for prompt, error, said in (
            ([5] * (MOST + 1), PromptTooLongError, f"{MOST + 1} tokens for the encoder.*{MOST} tokens at most"),
            ("word " * 10_000, PromptTooLongError, "characters for the encoder"),
            ([VOCAB_SIZE], InvalidRequestError, f"the id {VOCAB_SIZE}"),
            ([], InvalidRequestError, "empty prompt"),
            ({"decoder_prompt": ids}, InvalidRequestError, "without 'encoder_prompt'"),
            ({"encoder_prompt": ids, "text": ""}, InvalidRequestError, "the key 'text'"),
            ({"encoder_prompt": ids, "decoder_prompt": {**ids, "cache_salt": "a"}}, InvalidRequestError, "cache_salt"),
            ({"encoder_prompt": {"encoder_prompt": ids}}, InvalidRequestError, "the key 'encoder_prompt'"),
        ):
            with pytest.raises(error, match=said):
                llm.generate([prompt], GREEDY, use_tqdm=False)
        (out,) = llm.generate([{"prompt": "word " * 100, "truncate_prompt_tokens": 9}], GREEDY, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == NEW_TOKENS
    finally:
        llm.shutdown()


def test_what_is_not_served_is_refused_at_start(tmp_path: Path) -> None:
    make(tmp_path, ONE)
    for settings, said in (
        ({"pipeline_parallel_size": 2}, "does not serve stages"),
        ({"max_num_batched_tokens": MOST}, f"set max_num_batched_tokens to {MOST + 1}"),
    ):
        with pytest.raises(Exception, match=said):
            engine(tmp_path, **settings)


def test_float16_is_refused_where_it_overflows(tmp_path: Path) -> None:
    """Whatever the checkpoint is stored in."""
    make(tmp_path, "T5ForConditionalGeneration")
    with pytest.raises(Exception, match=r"in float16; .* than float16 holds; use --dtype bfloat16"):
        LLM(model=str(tmp_path), dtype="float16", max_num_batched_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"swap_space": 1 << 24}], ids=str)
@pytest.mark.parametrize("architecture", ENCODER_DECODERS)
def test_on_several_workers(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Over two ranks; and preempted requests swapped out."""
    answers = make(tmp_path, architecture)
    llm = engine(tmp_path, **settings)
    try:
        outputs = ask(llm, [answer.prompt for answer in answers])
    finally:
        llm.shutdown()
    assert sum(compare(one, out) for one, out in zip(answers, outputs, strict=True)) <= 1
