"""Trees of drafts: their form, their drafts beside the heads' choices, and what they bring."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plain
import pytest
import tiny_engine
import torch
from heads_at_once import at_once, opened
from proposals import Drafted

from engine import LLM, SamplingParams
from engine.interfaces.drafter import Drafts
from engine.types.errors import EngineError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_drafters.heads import FOLDER
from engine_drafters.medusa.body import MedusaDrafterBody
from engine_drafters.medusa.card import MedusaDrafter
from engine_drafters.tree import TREES, HeadOptions, ordered, parents_of
from engine_reference.attention_torch import card as attention_card
from engine_tiny import model_folder

TREE = [[1], [0], [0, 1], [1, 0], [0, 0], [2], [0, 0, 0], [0, 1, 1]]
BUNDLED = FOLDER / "eagle3"
ORDERED = ((0,), (0, 0), (0, 0, 0), (1,), (2,), (0, 1), (1, 0), (0, 1, 1))


def test_nodes_stand_behind_their_parents_and_the_chain_first() -> None:
    options = HeadOptions.model_validate({"tree": json.dumps(TREE)})
    assert options == HeadOptions.model_validate({"tree": TREE})
    assert options.tree == ORDERED and options.num_tokens == len(TREE)
    assert MedusaDrafter.branches(options) == 3 and MedusaDrafter.branches(HeadOptions()) == 0
    assert parents_of(ORDERED).tolist() == [-1, 0, 1, -1, -1, 0, 3, 5]
    for tree in TREES.values():
        assert ordered(tree) == tree and (parents_of(tree) < range(len(tree))).all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_the_choices_of_the_heads(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random heads, in float64: no token changes, and each node is the choice that its path names."""
    found: list[tuple[list[torch.Tensor], Drafts]] = []
    propose = MedusaDrafterBody.propose

    def recorded(self: Any, rows: Any, session: Any) -> Drafts:
        state = self._kept.get(rows.slot)
        drafts = propose(self, rows, session)
        found.append(([head(state) for head in session.model().heads], drafts))
        return drafts

    monkeypatch.setattr(MedusaDrafterBody, "propose", recorded)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=14, ignore_eos=True)
    asked = tiny_engine.of_drafter(model=str(tiny_engine.head("medusa", tmp_path)), tree=json.dumps(TREE))
    texts = []
    for more in ({}, {"drafter": "medusa", **asked}):
        with LLM(**tiny_engine.SETTINGS | {"max_num_batched_tokens": 48}, **more) as llm:
            texts.append([one.outputs[0].token_ids for one in llm.generate(tiny_engine.TEXTS, params, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert any(drafts.tokens.shape[1] == len(TREE) for _, drafts in found)
    for logits, drafts in found:
        assert drafts.parents is not None and drafts.counts is not None
        for node, path in enumerate(ORDERED[: drafts.tokens.shape[1]]):
            depth, choice = len(path) - 1, path[-1]
            best = logits[depth].topk(4).indices
            tokens = drafts.tokens[:, node].long()
            if temperature == 0:
                assert torch.equal(tokens, best[:, choice])
            elif choice:  # of the others, the likeliest
                first = drafts.tokens[:, ORDERED.index((0,) * (depth + 1))].long()
                others = [
                    [t for t in row if t != f][choice - 1] for row, f in zip(best.tolist(), first.tolist(), strict=True)
                ]
                assert tokens.tolist() == others


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "bundled"])
def test_each_path_is_the_one_that_it_is_alone(kind: str, proposals: list[Drafted], tmp_path: Path) -> None:
    """Drafts of EAGLE's layer in all steps, greedy ones: each is that choice, of what the layer makes of the path
    before it as a chain. Over prompts in chunks, requests that came back, rows that want fewer drafts, and paths of all
    kinds that were kept: of the bundled head's, which the others' never are."""
    layers = {"eagle": (), "eagle3": (0, 2, 5), "bundled": (1, 3, 5)}[kind]
    folder = BUNDLED
    if kind != "bundled":
        more = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}} if layers else {}
        folder = tiny_engine.head(kind, tmp_path, **more)
    asked = tiny_engine.of_drafter(model=str(folder), tree=json.dumps(TREE), adaptive=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
    settings = tiny_engine.SETTINGS | {"max_num_batched_tokens": 32, "enable_prefix_caching": False}
    with LLM(**settings, drafter="eagle", **asked) as llm:
        outputs = llm.generate(tiny_engine.TEXTS, greedy, use_tqdm=False)
        stats = llm.llm_engine.stats()
    assert stats.num_preemptions > 0 and (stats.num_accepted_drafts > 20) == (kind == "bundled")
    assert {len(proposal.drafts) for proposal in proposals} >= {len(TREE)} and len(proposals) > 20
    target = plain.open_model(model_folder(), torch.float64)
    body = opened(folder, target, {"vocab_size": tiny_engine.TINY.vocab, "hidden_size": tiny_engine.TINY.hidden})
    for output in outputs:
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        final, streams = tiny_engine.states(text)
        mine = [proposal for proposal in proposals if proposal.tokens == text[: len(proposal.tokens)]]
        assert mine
        for tokens, drafts in mine[::3]:
            n = len(tokens)
            read = body.fuse([streams[layer][: n - 1] for layer in layers]) if layers else final[: n - 1]
            chains = {(): (tokens[1:], read)}
            for path, draft in zip(ORDERED, drafts, strict=False):
                ids, features = chains[path[:-1]]
                made = at_once(body, torch.tensor(ids), features)[-1:]
                assert draft == int(body.logits(made).topk(1 + path[-1]).indices[0, -1]), path
                chains[path] = [*ids, draft], torch.cat((features, made))


@pytest.mark.skipif(find_spec("engine_cpu") is None, reason="engine-cpu is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("driver", ["eagle", "medusa"])
def test_beside_masks_and_penalties_on_the_cpu_driver(driver: str) -> None:
    """With the bundled heads, whose paths are kept: requests with a penalty and with a grammar get their chain beside
    one that gets the tree, one after the other and together."""
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    choice = StructuredOutputsParams(choice=["once upon a time there was", "a long time ago"])
    asked = [
        plain,
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=choice),
        SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    ]
    settings = {"max_num_batched_tokens": 64, "num_kv_pages": 120, "dtype": "float32", "attention": "cpu"}
    texts = []
    for more in ({}, {"drafter": driver, **tiny_engine.of_drafter(tree="tiny", adaptive=False)}):
        with LLM(**tiny_engine.SETTINGS | settings, **more) as llm:
            together = llm.generate(tiny_engine.TEXTS, asked, use_tqdm=False)
            alone = llm.generate(tiny_engine.TEXTS[:1], plain, use_tqdm=False)
            texts.append([list(one.outputs[0].token_ids) for one in (*together, *alone)])
            accepted = llm.llm_engine.stats().num_accepted_drafts
    assert texts[0] == texts[1] and accepted > 10, accepted


def test_an_attention_driver_without_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused before weights are read."""
    monkeypatch.setattr("engine_drafters.checkpoint.DraftHeadReader.weights", None)
    monkeypatch.setattr(attention_card, "FEATURES", attention_card.FEATURES - {"tree"})
    for kind in ("eagle", "medusa"):
        folder = tiny_engine.head(kind, tmp_path / kind)
        settings = {"drafter": kind, "attention": "torch", **tiny_engine.of_drafter(model=str(folder), tree=TREE)}
        with pytest.raises(EngineError, match=r"attention \(full\).*feature 'tree' is not served"):
            LLM(**tiny_engine.SETTINGS | settings)


@pytest.mark.parametrize(
    ("driver", "said", "options"),
    [
        ("medusa", r"\[1, 0, 0\] has no parent: \[1, 0\] is missing", {"tree": "[[0], [1], [1, 0, 0]]"}),
        ("medusa", r"\[0, 0, 0, 0\] has 4 choices, and there are 3 heads", {"tree": [[0] * n for n in (1, 2, 3, 4)]}),
        ("medusa", r"\[\[0\], \[0, 0\], \[1\]\], or one of 'tiny'", {"tree": "large"}),
        ("medusa", "num_tokens is 2, fewer than the 3 nodes", {"tree": [[0], [1], [2]], "num_tokens": 2}),
        ("medusa", "65 nodes; at most 64", {"tree": [[n] for n in range(65)]}),
        ("medusa", r"\[64\] has a choice that is not from 0 to 63", {"tree": [[0], [64]]}),
        ("medusa", r"\[1\] stands there twice", {"tree": [[1], [0], [1]]}),
        ("medusa", "at least one path", {"tree": []}),
        ("medusa", "tree.*valid", {"tree": "5"}),
        ("eagle", r"\[1, 0, 0\] has no parent", {"tree": "[[0], [1], [1, 0, 0]]"}),
    ],
)
def test_what_is_no_tree_is_refused(
    driver: str, said: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read: nothing of them is opened."""
    monkeypatch.setattr("engine_drafters.checkpoint.DraftHeadReader.weights", None)
    folder = tiny_engine.head("medusa", tmp_path) if driver == "medusa" else tmp_path
    tiny_engine.refused(driver, said, model=str(folder), **options)
