"""The toy operation's own driver, through the suite: a card that only defines is sound."""

from engine_sdk.conformance import OpsConformance
from engine_sdk.toy_ops import ToyOps


class TestToy(OpsConformance):
    card = ToyOps
    quick = r"card|known|body"  # what it defines is no operation of the suite's
