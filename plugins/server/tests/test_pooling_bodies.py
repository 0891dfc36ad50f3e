"""What bodies of requests that pool make of their fields."""

from __future__ import annotations

from engine.types.pooling import PoolingParams
from engine_server.pooling.bodies import PoolBody


def test_steps_of_a_reward() -> None:
    body = PoolBody(input="x", step_tag_id=7, returned_token_ids=[1], use_activation=False)
    asked = PoolingParams(task="token_classify", step_tag_id=7, returned_token_ids=[1], use_activation=False)
    assert body.params("token_classify") == asked


def test_use_activation_of_vectors() -> None:
    """It is another name of `normalize` there."""
    assert PoolBody(input="x", use_activation=False).params("embed") == PoolingParams(task="embed", normalize=False)
