"""A server with a model that pools: it starts, says what it is, and answers requests for text with a clear 400."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.conftest import Server

_HELPERS = Path(__file__).parents[2] / "core" / "tests"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT."""
    sys.path.insert(0, str(_HELPERS / "parity"))
    spec = importlib.util.spec_from_file_location("serving_pooling_models", _HELPERS / "pooling" / "pooling_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("bert")
    module.encoder_checkpoint(folder, "BertModel")
    return folder


def test_requests_for_text_are_refused(encoder: Path) -> None:
    server = Server(str(encoder), "--served-model-name", "bert")
    try:
        assert "none: the model keeps nothing" in "".join(server.lines)
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
