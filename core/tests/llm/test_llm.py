"""`LLM` end to end on a tiny random checkpoint: text, stops, logprobs, chat and errors, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineArgs, LLMEngine, SamplingParams
from engine.types.errors import (
    ConfigError,
    DriverNotFoundError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ModelNotFoundError,
    PluginError,
    PromptTooLongError,
    TokenizerError,
)

PROMPTS = ["Hello, my name is", "Grüße 你好", "x", "The quick brown fox jumps over the lazy dog. " * 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    path = checkpoints("llm")
    (path / "chat_template.jinja").write_text(CHAT)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=folder, dtype="float32", max_num_seqs=4, num_kv_pages=200) as model:
        yield model


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[..., list[int]]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(ids: list[int], count: int) -> list[int]:
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None
        )
        return list(map(int, out[0, len(ids) :]))

    return greedy


def completions(outputs: list[Any]) -> list[tuple[str, list[int]]]:
    return [(completion.text, completion.token_ids) for output in outputs for completion in output.outputs]


def test_greedy_text(llm: LLM, oracle: Callable[..., list[int]], folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer(prompt)["input_ids"]
        (completion,) = output.outputs
        assert completion.token_ids == oracle(output.prompt_token_ids, 20)
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish_reason == "length"


def test_end_of_sequence_and_stop_ids(llm: LLM, oracle: Callable[..., list[int]]) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    expected = oracle(ids, 20)
    stop = expected[7]
    first = expected.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=None, stop_token_ids=[stop])
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.token_ids == expected[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == llm.get_tokenizer().decode(expected[:first])


def test_stop_string(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[5:8]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=[stop], ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert llm.llm_engine.stats().num_running == 0 or not llm.llm_engine.has_unfinished_requests()


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None and len(completion.logprobs) == 6
    total = 0.0
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token  # the drawn one comes first; greedy draws the likeliest
        assert [entry.rank for entry in position.values()] == [1, 2, 3]
        values = [entry.logprob for entry in position.values()]
        assert values == sorted(values, reverse=True)
        total += values[0]
    assert completion.cumulative_logprob == pytest.approx(total)


def test_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=5, n=3, ignore_eos=True)
    first = completions(llm.generate(PROMPTS[0], params, use_tqdm=False))
    again = completions(llm.generate([PROMPTS[1], PROMPTS[0]], params, use_tqdm=False))[3:]
    assert first == again
    assert len({tuple(ids) for _, ids in first}) == 3
    alone = SamplingParams(temperature=1.0, max_tokens=12, seed=6, ignore_eos=True)
    assert completions(llm.generate(PROMPTS[0], alone, use_tqdm=False)) == first[1:2]
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    two = completions(llm.generate([PROMPTS[0]] * 2, unseeded, use_tqdm=False))
    assert two[0] != two[1]


def test_chat(llm: LLM, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    messages = [{"role": "user", "content": "Hi!"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    prompt = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert output.prompt == prompt
    (same,) = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY, use_tqdm=False)
    assert same.outputs[0].token_ids == output.outputs[0].token_ids
    (other,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert other.prompt == "Hi!"
    with pytest.raises(TokenizerError, match="refuses them: no"):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ raise_exception('no') }}")


def test_prompt_at_the_limit(llm: LLM) -> None:
    ids = [3] * 255
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(PromptTooLongError, match="256"):
        llm.generate({"prompt_token_ids": [*ids, 3]}, use_tqdm=False)


def test_the_classic_loop(folder: Path) -> None:
    args = EngineArgs(model=str(folder), dtype="float32", num_kv_pages=100)
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("a", PROMPTS[0], GREEDY)
        engine.add_request("b", PROMPTS[1], GREEDY)
        lengths: dict[str, list[int]] = {"a": [], "b": []}
        while engine.has_unfinished_requests():
            for output in engine.step():
                lengths[output.request_id].append(len(output.outputs[0].token_ids))
                if lengths["b"] and lengths["b"][-1] == 4:
                    engine.abort_request("b")
        assert lengths["a"][-1] == 20 and lengths["a"] == sorted(lengths["a"])
        assert max(lengths["b"]) == 4
        while engine.client.has_work():
            engine.step()
        assert engine.stats().pages_used == 0


def test_an_interrupt_gives_everything_back(folder: Path) -> None:
    class Bar:
        """Ctrl-C at the first prompt that is done, with others in every state."""

        def __init__(self, **options: Any) -> None:
            pass

        def update(self, count: int) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            pass

    with LLM(model=folder, dtype="float32", num_kv_pages=60, max_num_seqs=2, max_num_batched_tokens=32) as model:
        alone = completions(model.generate(PROMPTS, GREEDY, use_tqdm=False))
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPTS * 2, GREEDY, use_tqdm=Bar)
        engine = model.llm_engine
        assert not engine.has_unfinished_requests()
        assert completions(model.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
        while engine.client.has_work():
            engine.step()
        assert engine.stats().pages_used == 0


def test_a_request_that_cannot_fit_loses_no_other(folder: Path) -> None:
    with LLM(model=folder, dtype="float32", num_kv_pages=6) as small:  # 5 pages of 16 tokens
        prompts = ["short", {"prompt_token_ids": [3] * 200}, "short too"]
        with pytest.raises(KVCacheTooSmallError) as caught:
            small.generate(prompts, GREEDY, use_tqdm=False)
        outputs = caught.value.outputs  # type: ignore[attr-defined]
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        (again,) = small.generate("short", GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_bad_parameters(llm: LLM) -> None:
    for params in (SamplingParams(max_tokens=-1), SamplingParams(temperature=float("nan"))):
        with pytest.raises(InvalidRequestError):
            llm.generate("a", params, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="id 272"):
        llm.generate([272], use_tqdm=False)


def test_bad_settings(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(model=tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"max_model_len=257; the model was made for 256"):
        LLM(model=folder, max_model_len=257)
    with pytest.raises(DriverNotFoundError, match="tourch"):
        LLM(model=folder, attention="tourch")
    with pytest.raises(ConfigError, match="it is no folder, and no model has that name"):
        LLM(model=folder, tokenizer=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="modle"):
        LLM(model=folder, modle=1)


def test_another_tokenizer_and_none(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("token*", "special*", "chat*"))
    with pytest.raises(PluginError, match=r"no tokenizer\.json \(it holds no tokenizer file\)"):
        LLM(model=bare)
    with LLM(model=bare, tokenizer=str(folder), num_kv_pages=50) as model:
        (output,) = model.generate("Hello", GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 20
    shutil.copy(folder / "tokenizer.json", bare)
    with LLM(model=bare, num_kv_pages=50) as model, pytest.raises(TokenizerError, match="no chat template"):
        model.chat([{"role": "user", "content": "a"}], use_tqdm=False)


def test_end_ids_come_from_all_places(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    with LLM(model=copy, num_kv_pages=50) as model:
        assert model.llm_engine.frontend.inputs.eos_token_ids == [7, 8, 256]
    (copy / "generation_config.json").unlink()
    with LLM(model=copy, num_kv_pages=50) as model:
        assert model.llm_engine.frontend.inputs.eos_token_ids == [256]


def test_lower_max_model_len(folder: Path) -> None:
    with LLM(model=folder, max_model_len=32, num_kv_pages=50) as model:
        (output,) = model.generate([1] * 30, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(PromptTooLongError):
            model.generate([1] * 32, use_tqdm=False)
