"""The cards of drivers that deal whole experts over ranks."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from engine.interfaces.experts import ExpertsCard, ExpertsNeed

STEP_BYTES = ByteSize(8 << 20)


class DealtOptions(BaseModel):
    """Options of all drivers that deal experts.

    Attributes:
        redundant: places beside one for each expert of a layer, all ranks together, for second and further copies of
            those that most tokens go to.
        rebalance_every: steps after which the experts are dealt anew by the tokens that went to each, a layer before
            each step; where layers are left by then, after the next so many steps at which none is; 0: never.
        step_bytes: of weights that a rank sends or receives before one step while they move; one expert at least.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    redundant: int = Field(default=0, ge=0)
    rebalance_every: int = Field(default=0, ge=0)
    step_bytes: ByteSize = Field(default=STEP_BYTES, ge=1)

    @model_validator(mode="after")
    def _used(self) -> DealtOptions:
        if self.step_bytes != STEP_BYTES and not self.rebalance_every:
            raise ValueError("step_bytes bounds what moves, and nothing does: set rebalance_every, too")
        return self


class DealtCard(ExpertsCard):
    """What they have in common."""

    framework = "torch"
    Options = DealtOptions

    @classmethod
    def unsupported(cls, need: ExpertsNeed) -> list[str]:
        if not need.parallel.ep:
            return ["every rank is to have a part of each expert; --enable-expert-parallel deals them whole"]
        return []


class GatherExperts(DealtCard):
    """Every rank computes its experts for all tokens, and one sum over ranks follows. Shapes depend on no token."""

    priority = 10
    batch_invariant = True
    body = "engine_moe.dealt.gather:GatherBody"


class AllToAllExperts(DealtCard):
    """Tokens go to the ranks that have their experts, and what these make of them comes back."""

    priority = -10  # by name: it waits for the device to know how many go where
    captured_by = frozenset()
    body = "engine_moe.dealt.all_to_all:AllToAllBody"


class DeepEPOptions(DealtOptions):
    """Options of `deepep`.

    Attributes:
        low_latency: by the library's kernels for few tokens, over RDMA, whose shapes depend on no token; memory is
            taken for as many tokens as a step may have.
    """

    low_latency: bool = False


class DeepEPExperts(DealtCard):
    """As `all_to_all`, by the kernels of the DeepEP library over NVLink and RDMA. Not verified on GPUs."""

    priority = -20  # by name
    Options = DeepEPOptions
    captured_by = frozenset()
    body = "engine_moe.dealt.deepep:DeepEPBody"

    @classmethod
    def unsupported(cls, need: ExpertsNeed) -> list[str]:
        reasons = super().unsupported(need)
        if need.device.partition(":")[0] != "cuda":
            reasons.append(f"the library moves memory of NVIDIA's GPUs, not {need.device}'s")
        if find_spec("deep_ep") is None:
            reasons.append("the DeepEP library is not installed (build it from its repository, deepseek-ai/DeepEP)")
        return reasons
