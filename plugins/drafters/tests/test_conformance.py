"""The package's drivers pass the suites of their points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import published
import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine_drafters.checkpoint import SCHEME
from engine_drafters.eagle.card import head_of
from engine_drafters.layouts import EAGLE3
from engine_drafters.tree import HeadOptions
from engine_sdk.conformance import CheckpointConformance, DrafterConformance
from engine_sdk.conformance.drafter import PlayedModel


class TestDraftHead(CheckpointConformance):
    driver = "draft_head"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _head(cls, tmp_path_factory: Any) -> None:
        folder = tmp_path_factory.mktemp("head")
        published.write(folder, {**published.LAYER, "architectures": ["LlamaForCausalLM"]}, published.eagle())
        cls.model = f"{SCHEME}{folder}"


class TestFeatures(DrafterConformance):
    """The body of `eagle` too."""

    driver = "mtp"


class PlayedHeads(PlayedModel):
    """Of `medusa` and `eagle`: what their models have beside `logits`."""

    @property
    def heads(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [lambda state, head=head: self.logits(torch.roll(state, head, 1)) for head in range(4)]

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(streams), 1)


class Heads(DrafterConformance):
    """A driver that finds the head which the class writes."""

    played = PlayedHeads
    head: ClassVar[Callable[[Path], Path]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _found(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        folder = cls.head(tmp_path_factory.mktemp("head"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("engine_drafters.eagle.card.find", lambda target, kind: folder)
            yield


def _eagle3(folder: Path) -> Path:
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}}
    return published.write(folder, {**published.LAYER, "draft_vocab_size": 24, **layers}, published.eagle3())


class EagleHeads(Heads):
    """EAGLE-3, which reads streams."""

    driver, head = "eagle", staticmethod(_eagle3)

    @classmethod
    def context(cls) -> WorkerContext:
        """With its architecture, in the sizes of the target."""
        context = super().context()
        (draft,) = context.start.drafts
        head = head_of("eagle", draft.model, HeadOptions(), "eagle3", (EAGLE3,))
        model = msgspec.structs.replace(draft.model, architecture=EAGLE3, config=head.config)
        drafts = (msgspec.structs.replace(draft, model=model),)
        return replace(context, start=msgspec.structs.replace(context.start, drafts=drafts))


@pytest.mark.slow
class TestEagle(EagleHeads):
    """Its chains are those of `mtp` too."""


class TestEagleTree(EagleHeads):
    options: ClassVar[dict[str, Any]] = {"tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]]}


def _medusa(folder: Path) -> Path:
    return published.write(folder, {"medusa_num_heads": 4}, published.medusa(), "medusa_lm_head.pt")


class TestMedusa(Heads):
    driver, head = "medusa", staticmethod(_medusa)


@pytest.mark.slow
class TestMedusaTree(TestMedusa):
    options = TestEagleTree.options


@pytest.mark.slow
class TestFeaturesDrawn(DrafterConformance):
    driver, options = "mtp", {"acceptance": "rejection"}
    rejects = True
