"""The training of heads: what the head computes for whole texts at once, against drafting token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_drafters.train.__main__ import KINDS
from engine_drafters.train.draft_model import Draft
from engine_drafters.train.eagle3 import Eagle3, Eagle3Head
from engine_drafters.train.loop import Acceptance, measure, train
from engine_drafters.train.medusa import MedusaHeads, MedusaTraining
from engine_drafters.train.target import Batch, Target, batches, make_batch
from engine_drafters.train.texts import Text, read_texts, save_texts
from engine_drafters.train.tree import grown, right_paths, tokens_per_step

VOCAB_SIZE = 40
CONFIG = {
    "hidden_size": 16, "target_hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


def llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def target() -> Target:
    torch.manual_seed(1)
    return Target(llama(3))


def texts(count: int = 6) -> list[Text]:
    """Two turns each, spoken from the fourth token on but for three in the middle."""
    rng = np.random.default_rng(2)
    made = []
    for length in rng.integers(12, 20, count):
        spoken = np.ones(length, dtype=bool)
        spoken[:4] = spoken[8:11] = False
        made.append(Text(rng.integers(0, VOCAB_SIZE, length), spoken))
    return made


def eagle3(target: Target) -> Eagle3:
    head = Eagle3Head(CONFIG, target.embedding, torch.arange(0, VOCAB_SIZE, 2))
    return Eagle3(target, head, (0, 1, 2), make_batch(texts()))


def test_roots_are_where_a_token_of_the_turn_is_said_already_and_another_follows() -> None:
    spoken = np.array([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    batch = make_batch([Text(np.arange(12), spoken), Text(np.arange(3), np.zeros(3, dtype=bool))])
    assert batch.root.tolist() == [1, 2, 3, 7]
    assert batch.drafted.tolist() == [3, 2, 1, 1]
    assert batch.place.tolist() == [0, 1, 2, 3]
    assert batch.behind(batch.tokens, 2).tolist() == [3, 4, 5, 9]


def test_texts_are_read_as_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "texts.safetensors"
    saved = texts()
    save_texts(path, saved)
    for one, other in zip(saved, read_texts(path), strict=True):
        assert (one.tokens == other.tokens).all() and (one.spoken == other.spoken).all()


def by_hand(head: Eagle3Head, tokens: torch.Tensor, streams: torch.Tensor, root: int, steps: int) -> list[torch.Tensor]:
    """The logits of `steps` drafts behind one root, each by a dense pass over all positions up to its own."""
    features = list(head.fc(streams[: root + 1]))
    layer, attention = head.midlayer, head.midlayer.self_attn
    made = []
    while len(made) < steps:
        feature = torch.stack(features)
        embedded = head.embedding[tokens[1 : len(feature) + 1]]
        read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], -1)
        q, k, v = (p(read).unflatten(-1, (-1, 4)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        places = torch.arange(len(feature))
        q, k = layer.rotate(q, places), layer.rotate(k, places)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        shares = (torch.einsum("hd,nhd->hn", q[-1], k) / 2).softmax(-1)
        hidden = feature[-1] + attention.o_proj(torch.einsum("hn,nhd->hd", shares, v).flatten())
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        features.append(hidden)
        made.append(head.lm_head(head.norm(hidden)))
    return made


@torch.no_grad()
def test_an_eagle_head_unrolled_over_a_text_computes_what_drafting_token_by_token_does(target: Target) -> None:
    objective = eagle3(target)
    head, batch = objective.module, make_batch(texts())
    streams = torch.cat(target.states(batch.tokens)[0], dim=-1)
    for step, logits in enumerate(head.logits(batch, streams, 3)):
        roots = torch.arange(len(batch.root))[batch.drafted > step].tolist()
        for number, got in zip(roots, logits, strict=True):
            row, root = int(batch.row[number]), int(batch.root[number])
            wanted = by_hand(head, batch.tokens[row], streams[row], root, step + 1)[step]
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_scale_of_the_streams_is_part_of_what_is_exported(target: Target) -> None:
    objective, batch = eagle3(target), make_batch(texts())
    tokens = objective.tokens(batch)
    objective.module.load_state_dict(objective.tensors())
    streams = torch.cat(target.states(batch.tokens)[0], dim=-1)
    logits = objective.module.logits(batch, streams, len(tokens))
    assert [objective.module.to_target[row.argmax(-1)].tolist() for row in logits] == [t.tolist() for t in tokens]


def test_streams_are_those_of_transformers_but_for_the_last_which_is_not_normed(target: Target) -> None:
    batch = make_batch(texts(2))
    streams, hidden = target.states(batch.tokens)
    outputs = target.model.model(input_ids=batch.tokens, output_hidden_states=True).hidden_states
    assert torch.equal(streams[0], outputs[1]) and torch.equal(streams[1], outputs[2])
    assert torch.equal(hidden, outputs[3])
    assert torch.allclose(target.model.model.norm(streams[2]), hidden)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_few_steps_on_a_random_target_lower_the_loss(target: Target, kind: str) -> None:
    objective = {
        "eagle3": lambda: eagle3(target),
        "medusa": lambda: MedusaTraining(target, MedusaHeads(16, heads=2, layers=1)),
        "draft": lambda: Draft(target, llama(1)),
    }[kind]()
    batch = make_batch(texts())
    before = objective.loss(batch).item()
    said: list[str] = []
    train(
        objective, batches(texts(), np.random.default_rng(0), 64), 0.005, warmup_steps=1, report_minutes=0.0,
        report=lambda: str(measure(objective, [batch])), say=said.append,
    )  # fmt: skip
    assert objective.loss(batch).item() < before
    assert "tokens a step" in said[-2] and "done" in said[-1]


class Fixed:
    """Drafts that are right in the places that are named, by the text's token that they are for."""

    module = torch.nn.Identity()

    def __init__(self, wrong: set[int]) -> None:
        self._wrong = wrong

    def loss(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(())

    def tokens(self, batch: Batch) -> list[torch.Tensor]:
        made = []
        for step in range(2):
            root = batch.root[batch.drafted > step]
            wanted = batch.behind(batch.tokens, 2 + step)[batch.drafted > step]
            made.append(torch.where(torch.isin(root + 2 + step, torch.tensor(list(self._wrong))), -1, wanted))
        return made


@pytest.mark.parametrize(
    ("wrong", "shares", "tokens_per_step"),
    [
        (set(), [1.0, 1.0], 7 / 3),  # of the tokens 3 to 9: three, three, and the last one
        ({4}, [1.0, 2 / 3], 7 / 3),  # 3 and 4; 5, 6 and 7; 8 and 9
        (set(range(3, 10)), [0.0], 1.0),
    ],
)
def test_acceptance_is_measured_as_a_decoder_would_walk(
    wrong: set[int], shares: list[float], tokens_per_step: float
) -> None:
    text = Text(np.arange(10), np.arange(10) >= 2)
    assert measure(Fixed(wrong), [make_batch([text])]) == Acceptance(shares, pytest.approx(tokens_per_step))


def test_a_tree_for_medusa(target: Target) -> None:
    """A path names the choice of each head that says what was said; a chain gives what `measure` gives, and a tree of
    all paths whatever can be had."""
    heads, batch = MedusaHeads(16, 3, 1), make_batch(texts())
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    objective = MedusaTraining(target, heads)
    paths = right_paths(objective, batch)
    best = [logits.topk(VOCAB_SIZE).indices for logits in objective.logits(batch)]
    for step, order in enumerate(best):
        roots = torch.nonzero(batch.drafted > step).flatten()
        for place, root in enumerate(roots.tolist()):
            said = int(batch.behind(batch.tokens, 2 + step)[root])
            assert int(order[place, paths[root][step]]) == said
    assert [len(path) for path in paths] == batch.drafted.clamp(max=3).tolist()
    chain, tree = (grown([*paths, (0, 0, 0)], 3, size) for size in (3, 9))
    assert chain == tree[:3] == ((0,), (0, 0), (0, 0, 0)) and len(tree) == 9
    assert tokens_per_step(objective, [batch], chain) == measure(objective, [batch]).tokens_per_step
    everything = tuple({path[:n] for path in paths for n in range(1, 4)})
    assert tokens_per_step(objective, [batch], everything) > tokens_per_step(objective, [batch], chain)
