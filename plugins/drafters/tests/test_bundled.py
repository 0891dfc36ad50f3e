"""`--drafter NAME` and nothing else, with the bundled model: its own drafter is found, and first drafts are kept."""

from collections.abc import Iterator

import pytest

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.types.outputs import StepStats
from engine_drafters.tree import TREES
from engine_tiny import model_folder
from engine_tiny.probe import questions
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import load_tokenizer

SIZES = {"max_num_seqs": 8, "num_kv_pages": 400, "max_model_len": 1024, "dtype": "float32"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    encoder = Encoder(load_tokenizer(model_folder()))
    return [encoder.prompt(question.messages, question.tools) for question in questions(1)]


def answers(prompts: list[list[int]], **settings: object) -> tuple[list[list[int]], StepStats]:
    """Greedy answers, and what became of the drafts."""
    engine = LLMEngine.from_engine_args(EngineArgs(model="tiny", **SIZES, **settings))
    try:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=40)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        made = dict(_finished(engine))
        return [made[str(number)] for number in range(len(prompts))], engine.stats()
    finally:
        engine.shutdown()


def _finished(engine: LLMEngine) -> Iterator[tuple[str, list[int]]]:
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield output.request_id, list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return answers(prompts)[0]


@pytest.mark.parametrize(("drafter", "kept"), [("eagle", 0.7), ("medusa", 0.3), ("draft_model", 0.5)])
def test_the_bundled_model_has_drafters_of_its_own(
    prompts: list[list[int]], plain: list[list[int]], drafter: str, kept: float
) -> None:
    options = {"drafter.num_tokens": 1, "drafter.adaptive": False}
    said, stats = answers(prompts, drafter=drafter, **options)
    assert said == plain
    assert stats.num_accepted_drafts > kept * stats.num_drafts


@pytest.mark.parametrize("drafter", ["medusa", "eagle"])
def test_trees_are_kept_more_often_than_their_chain(
    drafter: str, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Of the bundled heads: a chain, the same with one more branch of Medusa's, and the named tree."""
    chain, accepted, lengths = TREES["tiny"][:4], [], []
    assert chain == tuple((0,) * n for n in range(1, 5))
    branch = [{"drafter.tree": [*chain, (1,)]}] if drafter == "medusa" else []
    for options in ({}, *branch, {"drafter.tree": "tiny"}):
        said, stats = answers(prompts, **{"drafter": drafter, "drafter.adaptive": False, **options})
        assert said == plain
        accepted.append(stats.num_accepted_drafts)
        lengths.append(sum(map(len, said)) / (sum(map(len, said)) - stats.num_accepted_drafts))
    print(f"{drafter}: tokens a step of a request {', '.join(f'{length:.2f}' for length in lengths)}")
    assert accepted == sorted(set(accepted)), accepted
