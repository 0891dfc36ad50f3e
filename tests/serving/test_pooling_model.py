"""A server with a model that pools: it starts, says what it is, and answers requests for text with a clear 400."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import Server
from tests.serving.pooling_checkpoints import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT."""
    return make_encoder(tmp_path_factory.mktemp("bert"), "BertModel")


def test_requests_for_text_are_refused(encoder: Path) -> None:
    server = Server(str(encoder), "--served-model-name", "bert")
    try:
        assert "no KV cache" in "".join(server.lines)
        with httpx.Client(base_url=server.address, timeout=30) as client:
            assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["bert"]
            for stream in (False, True):
                answer = client.post("/v1/completions", json={"model": "bert", "prompt": "hello", "stream": stream})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert "generate with BertModel; this engine was started to pool" in error["message"]
            assert client.get("/health").status_code == 200
            assert "kv_pages_used" in client.get("/metrics").text
    finally:
        assert server.stop() == 0, "".join(server.lines)
