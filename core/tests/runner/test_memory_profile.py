"""The walk of the memory profile: one layer of each kind, told by what the layers hold."""

from __future__ import annotations

from types import SimpleNamespace

from engine.interfaces.attention import AttentionLayer
from engine.interfaces.model import State
from engine.runner.attention import LayerAttention
from engine.runner.walk import OneOfEachKind


class Block:
    """Holds a layer's attention two parts deep."""

    def __init__(self, attend: LayerAttention) -> None:
        self.inner = Inner(attend)


class Inner:
    """A part."""

    def __init__(self, attend: LayerAttention) -> None:
        self.attend = attend


def attention(group: int) -> LayerAttention:
    layer = AttentionLayer(index=0, group=SimpleNamespace(index=group, kind="full"), need=None, scale=1.0)  # type: ignore[arg-type]
    return LayerAttention(layer, None, [])  # type: ignore[arg-type]


def test_kinds_are_told_by_what_the_layers_hold() -> None:
    """A stage that begins at layer 2, and a second walk, whose layers are other groups' than the first ones'."""
    layers = [Block(attention(group)) for group in (0, 0, 1, 0, 1)]
    walk = OneOfEachKind()
    assert list(walk(layers, State())) == [layers[0], layers[2]]
    assert list(walk(layers[2:], State())) == [layers[2], layers[3]]
    second = [Block(attention(2)), Block(attention(2))]
    assert list(walk(second, State())) == second[:1]
