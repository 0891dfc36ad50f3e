"""What cards of models with routed experts have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.interfaces.model import ModelNeed
from engine.interfaces.ops import MODEL_OPERATIONS
from engine_kit.model_config import bad_key, flag, integer, number, unsupported_ranks
from engine_kit.routing import RouteForm
from engine_models.decoder_card import DecoderCard
from engine_moe.ops_moe.card import OPERATIONS


class ExpertsCard(DecoderCard):
    """Base of cards of decoders with routed experts.

    Attributes:
        count: the keys of how many experts there are, the first that is there counts.
        inner: the key of an expert's inner size.
    """

    operations = frozenset(MODEL_OPERATIONS) | OPERATIONS
    quantized = DecoderCard.quantized | {"expert"}
    count: ClassVar[tuple[str, ...]] = ("num_experts", "num_local_experts")
    inner: ClassVar[str] = "moe_intermediate_size"

    @classmethod
    def num_experts(cls, config: Mapping[str, Any]) -> int:
        """Raises CheckpointError where the config does not say it."""
        return integer(config, next((key for key in cls.count if config.get(key) is not None), cls.count[0]))

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """How experts are chosen: the best of a softmax, whose weights may be made to add up to 1."""
        return RouteForm(integer(config, "num_experts_per_tok"), renormalise=flag(config, "norm_topk_prob", False))

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        if (reasons := super().unsupported(need)) or need.parallel.ep:
            return reasons
        config = cls.filled(need.config)
        inner = {cls.inner: integer(config, cls.inner)}
        return unsupported_ranks(cls.describe(config), need.parallel.tp, **inner)

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Routing that makes no sense."""
        count, form = cls.num_experts(config), cls.form(config)
        if count % form.groups:
            raise bad_key(config, "n_group", f"{count} experts do not stand in {form.groups} groups of one size")
        if form.pairs and form.top_groups < form.groups > count // 2:
            raise bad_key(config, "n_group", f"of {count} experts in {form.groups} groups no two stand together")
        if form.top_groups > form.groups:
            raise bad_key(config, "topk_group", f"{form.top_groups} of {form.groups} groups cannot be open")
        if form.top_k > (at_most := count // form.groups * form.top_groups):
            raise bad_key(config, "num_experts_per_tok", f"{form.top_k} of {at_most} experts cannot be chosen")
        return []


class GroupsCard(ExpertsCard):
    """Base of cards with DeepSeek-V3's routing (2024): sigmoids, a bias for choosing, groups of experts, and shared
    experts that all tokens use; the first layers are dense."""

    count = ("n_routed_experts", "num_local_experts", "num_experts")

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """By `n_group`, `topk_group`, `norm_topk_prob`, `routed_scaling_factor`."""
        return RouteForm(
            integer(config, "num_experts_per_tok"),
            sigmoid=True,
            renormalise=flag(config, "norm_topk_prob", True),
            scale=number(config, "routed_scaling_factor", 1.0),
            groups=integer(config, "n_group", 1),
            top_groups=integer(config, "topk_group", 1),
            pairs=True,
        )
