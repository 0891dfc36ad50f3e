"""The interface bears drafters that make all their drafts in one pass: `one_pass` passes the suite, drafts what its
formula says, and changes no token."""

from __future__ import annotations

from pathlib import Path

import plain
import proposals
import pytest
import torch
from heads_at_once import at_once, opened
from one_pass import MASK, OnePassBody, mask_feature
from one_pass_card import OnePass
from tiny_engine import SETTINGS, TEXTS, TINY, head, of_drafter, states, tokens

from engine import LLM, SamplingParams
from engine_sdk.conformance import DrafterConformance
from engine_tiny import model_folder

DRAFTS = 4


class TestOnePass(DrafterConformance):
    card = OnePass
    test_card_is_light = None  # type: ignore[assignment]  # it brings another's with it, and no start waits for it


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter, as a package would bring it."""
    info = tmp_path / "site" / "engine_one_pass-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-one-pass\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[engine.drafter.v1]\none_pass = one_pass_card:OnePass\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_drafts_are_those_of_one_pass(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step, over prompts in chunks and drafts that were not kept: from the target's states of the whole text
    and the masks behind it, all computed at once."""
    recorded = proposals.record(monkeypatch, [OnePassBody])
    folder = head("eagle", tmp_path / "head")
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    asked = of_drafter(model=str(folder), adaptive=False, num_tokens=DRAFTS)
    with LLM(**SETTINGS, drafter="one_pass", enable_prefix_caching=False, **asked) as llm:
        outputs = llm.generate(TEXTS, greedy, use_tqdm=False)
    body = opened(folder, plain.open_model(model_folder(), torch.float64), {"vocab_size": TINY.vocab})
    masks = mask_feature(TINY.hidden).expand(DRAFTS - 1, -1)
    assert len(recorded) > 20
    for text in ([*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs):
        final, _ = states(text)
        mine = [one for one in recorded if one.tokens == text[: len(one.tokens)]]
        assert mine
        for so_far, drafts in mine[::3]:
            n = len(so_far)
            ids = torch.tensor([*so_far[1:], *[MASK] * (DRAFTS - 1)])
            made = at_once(body, ids, torch.cat((final[: n - 1], masks)))
            assert drafts == body.logits(made[n - 2 :]).argmax(1)[: len(drafts)].tolist()


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_it_changes_no_token(acceptance: str, installed: None, tmp_path: Path) -> None:
    """Greedy and sampled, with penalties, in a crowded cache; greedy only, by rejection."""
    asked = of_drafter(model=str(head("eagle", tmp_path / "head")), adaptive=False, acceptance=acceptance)
    same = slice(None) if acceptance == "exact" else slice(None, None, 2)
    assert tokens(drafter="one_pass", **asked)[same] == tokens(num_kv_pages=120)[same]
