"""The drafters in a whole engine: heads with random weights change no token, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import plain
import published
import pytest
import torch
from heads_at_once import at_once, opened
from proposals import Drafted
from tiny_engine import SETTINGS, TEXTS, TINY, head, of_drafter, refused, states, tokens

from engine import LLM, SamplingParams
from engine_tiny import model_folder


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(num_kv_pages=120)


@pytest.mark.parametrize(
    ("acceptance", "kind"),
    [
        ("exact", "eagle3"),
        ("exact", "medusa"),
        ("rejection", "eagle"),
        pytest.param("exact", "eagle", marks=pytest.mark.slow),
        pytest.param("rejection", "eagle3", marks=pytest.mark.slow),
        pytest.param("rejection", "medusa", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_without_drafts(kind: str, acceptance: str, expected: list[list[int]], tmp_path: Path) -> None:
    """Greedy and sampled, with penalties, in a crowded cache with prompts in chunks; greedy only, by rejection."""
    driver = "medusa" if kind == "medusa" else "eagle"
    found = tokens(drafter=driver, **of_drafter(model=str(head(kind, tmp_path)), adaptive=False, acceptance=acceptance))
    same = slice(None) if acceptance == "exact" else slice(None, None, 2)
    assert found[same] == expected[same]


@pytest.mark.parametrize("kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3", "medusa"])
def test_drafts_are_those_of_the_formula(kind: str, proposals: list[Drafted], tmp_path: Path) -> None:
    """Greedy ones, of every step: from what the target computes of the whole text at once, and the head likewise. Over
    prompts in chunks, drafts that were not kept, and requests that came back."""
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}} if kind == "eagle3" else {}
    folder = head(kind, tmp_path, **layers)
    driver = "medusa" if kind == "medusa" else "eagle"
    greedy = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
    asked = of_drafter(model=str(folder), adaptive=False, num_tokens=3)
    with LLM(**SETTINGS, drafter=driver, enable_prefix_caching=False, **asked) as llm:
        outputs = llm.generate(TEXTS, greedy, use_tqdm=False)
        stats = llm.llm_engine.stats()
    assert stats.num_preemptions > 0 and len(proposals) > 20
    target = plain.open_model(model_folder(), torch.float64)
    body = opened(folder, target, {"vocab_size": TINY.vocab, "hidden_size": TINY.hidden})
    whole = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    for text in whole:
        final, streams = states(text)
        mine = [p for p in proposals if p.tokens == text[: len(p.tokens)]]
        assert mine
        for so_far, drafts in mine[::4]:
            n = len(so_far)
            if kind == "medusa":
                expected = [int(one(final[n - 2 : n - 1]).argmax()) for one in body.heads]
            else:
                read = final[: n - 1] if kind == "eagle" else body.fuse([streams[i][: n - 1] for i in (0, 3, 5)])
                expected, ids = [], so_far[1:]
                for _ in range(3):
                    made = at_once(body, torch.tensor(ids), read)
                    expected.append(int(body.logits(made[-1:]).argmax()))
                    ids, read = [*ids, expected[-1]], torch.cat((read, made[-1:]))
            assert drafts == expected[: len(drafts)]


# -- what does not fit -------------------------------------------------------------------------------------------------
def test_a_head_for_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read: nothing of them is opened."""
    monkeypatch.setattr("engine_drafters.checkpoint.DraftHeadReader.weights", None)
    others = {"wide": TINY._replace(hidden=128), "words": TINY._replace(vocab=1000)}
    for name, of in others.items():
        llama = {**of.layer(), "architectures": ["LlamaForCausalLM"]}
        eagle = published.write(tmp_path / name, llama, published.eagle(of=of))
        refused("eagle", {"wide": "128.*256", "words": "1,000 tokens.*4,096"}[name], model=str(eagle))
        stored = published.medusa(of=of)
        heads = published.write(tmp_path / f"{name}-heads", {"medusa_num_heads": 2}, stored, "medusa_lm_head.pt")
        refused("medusa", {"wide": r"\(128, 128\).*\(256, 256\)", "words": r"\(1000, 256\)"}[name], model=str(heads))
    for key, said in (("vocab_size", "vocab_size is 1000.*4096"), ("hidden_size", "hidden_size is 1000.*256")):
        refused("medusa", said, model=str(head("medusa", tmp_path / key, **{key: 1000})))
    deep = {"eagle_aux_hidden_state_layer_ids": [2, 20, 40]}
    refused("eagle", "layers 0 to 5", model=str(head("eagle3", tmp_path / "deep", **deep)))
    refused("eagle", "2 layers", model=str(head("eagle", tmp_path / "two", num_hidden_layers=2)))


def test_what_is_no_head_of_the_driver_is_refused(tmp_path: Path) -> None:
    refused("eagle", "MedusaModel.*--drafter medusa", model=str(head("medusa", tmp_path / "medusa")))
    refused("medusa", "LlamaForCausalLMEagle.*--drafter eagle", model=str(head("eagle", tmp_path / "eagle")))
    refused("eagle", "no folder .*nowhere", model=str(tmp_path / "nowhere"))
    refused("eagle", "draft_model", model=str(model_folder()))
    refused("mtp", "LlamaForCausalLM.*DeepseekV3ForCausalLM")
