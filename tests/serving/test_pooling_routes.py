"""Embeddings, labels, scores and rankings over HTTP: what `LLM` gives for the same, in the shapes that clients know."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from engine import LLM, PoolingParams
from engine.errors import InvalidRequestError, PromptTooLongError
from tests.serving.conftest import Server
from tests.serving.pooling_checkpoints import make_encoder

TEXTS = ["That is a happy person", "That is a very happy person", "Today is a sunny day"]


RANKED: dict[str, Any] = {"query": TEXTS[0]}
CHAT = [{"role": "user", "content": TEXTS[0]}]


class Pair:
    """The same model twice: behind a server, and as `LLM` in this process."""

    def __init__(self, model: str, *args: str, **settings: Any) -> None:
        self.llm = LLM(model, dtype="float64", max_num_seqs=8, **settings)
        self.server = Server(model, "--dtype", "float64", "--served-model-name", "m", "--max-num-seqs", "8", *args)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.server.address + path, json=body, timeout=60)

    def stop(self) -> None:
        self.llm.shutdown()
        assert self.server.stop() == 0, "".join(self.server.lines)


@pytest.fixture(scope="module")
def embedder() -> Iterator[Pair]:
    short = {"runner": "pooling", "max_model_len": 512, "num_kv_pages": 1000}
    pair = Pair("tiny", "--runner", "pooling", "--max-model-len", "512", **short)
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    names = {0: "bad", 1: "middling", 2: "good"}
    folder = make_encoder(tmp_path_factory.mktemp("c"), "BertForSequenceClassification", num_labels=3, id2label=names)
    pair = Pair(str(folder))
    yield pair
    pair.stop()


@pytest.fixture(scope="module")
def crosser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = make_encoder(tmp_path_factory.mktemp("x"), "BertForSequenceClassification", num_labels=1)
    pair = Pair(str(folder))
    yield pair
    pair.stop()


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-6)


def test_inputs_that_are_cut(classifier: Pair) -> None:
    """[CLS] and [SEP] stay around the beginning of the text."""
    body = {"input": "That is a very happy person indeed"}
    whole = classifier.post("/tokenize", prompt=body["input"]).json()["tokens"]
    cut = classifier.post("/classify", **body, truncate_prompt_tokens=5).json()
    same = classifier.post("/classify", input=[[*whole[:4], whole[-1]]]).json()
    assert cut["data"][0]["probs"] == same["data"][0]["probs"] and cut["usage"]["prompt_tokens"] == 5
    assert classifier.post("/classify", **body, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == len(
        whole
    )
    too_long = {"input": "happy " * 5000}
    assert classifier.post("/classify", **too_long).status_code == 400
    assert classifier.post("/classify", **too_long, truncate_prompt_tokens=-1).status_code == 200
    for most, words in ((2, "none of it would be left"), (0, "from 1, or -1")):
        answer = classifier.post("/classify", **body, truncate_prompt_tokens=most)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_the_official_client_embeds(embedder: Pair) -> None:
    client = embedder.server.client()
    expected = [output.outputs.embedding for output in embedder.llm.embed(TEXTS, use_tqdm=False)]
    plain = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model="m", input=TEXTS)  # the client asks for base64, and unpacks it
    assert [one.index for one in plain.data] == [0, 1, 2] and plain.object == "list" and plain.model == "m"
    close([one.embedding for one in plain.data], expected)
    close([one.embedding for one in packed.data], expected)
    tokens = sum(len(embedder.llm.embed(text, use_tqdm=False)[0].prompt_token_ids) for text in TEXTS)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == tokens
    short = client.embeddings.create(model="m", input=TEXTS[0], dimensions=16)
    params = PoolingParams(dimensions=16)
    close(short.data[0].embedding, embedder.llm.embed(TEXTS[0], params, use_tqdm=False)[0].outputs.embedding)
    ids = [5, 6, 7, 8]
    for given in (ids, [ids]):
        found = client.embeddings.create(model="m", input=given)
        close(found.data[0].embedding, embedder.llm.embed([ids], use_tqdm=False)[0].outputs.embedding)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="m", input="x", dimensions=10**6)
    assert caught.value.param == "dimensions" and "this model's vectors have" in caught.value.message


def test_langchain_embeds(embedder: Pair) -> None:
    expected = [output.outputs.embedding for output in embedder.llm.embed(TEXTS, use_tqdm=False)]
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "base_url": embedder.server.address + "/v1"}
    # Otherwise it sends token ids, of OpenAI's own tokenizer.
    embeddings = OpenAIEmbeddings(model="m", check_embedding_ctx_length=False, **options)
    close(embeddings.embed_documents(TEXTS), expected)
    close(embeddings.embed_query(TEXTS[0]), expected[0])
    close(asyncio.run(embeddings.aembed_documents(TEXTS, chunk_size=2)), expected)
    short = OpenAIEmbeddings(model="m", check_embedding_ctx_length=False, dimensions=16, **options)
    params = PoolingParams(dimensions=16)
    close(short.embed_query(TEXTS[0]), embedder.llm.embed(TEXTS[0], params, use_tqdm=False)[0].outputs.embedding)


def test_the_asynchronous_client_embeds(embedder: Pair) -> None:
    expected = [output.outputs.embedding for output in embedder.llm.embed(TEXTS, use_tqdm=False)]

    async def ask() -> list[Any]:
        options: dict[str, Any] = {"base_url": embedder.server.address + "/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            answers = await asyncio.gather(*(client.embeddings.create(model="m", input=text) for text in TEXTS))
            return [answer.data[0].embedding for answer in answers]

    close(asyncio.run(ask()), expected)


def test_base64_is_little_endian_float32(embedder: Pair) -> None:
    answer = embedder.post("/v1/embeddings", input="x", encoding_format="base64", normalize=False).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    params = PoolingParams(normalize=False)
    close(vector, embedder.llm.embed("x", params, use_tqdm=False)[0].outputs.embedding)
    same = embedder.post("/v1/embeddings", input="x", use_activation=False).json()
    close(vector, same["data"][0]["embedding"])
    both = embedder.post("/v1/embeddings", input="x", use_activation=False, normalize=False)
    assert both.status_code == 400 and "another name of normalize" in both.json()["error"]["message"]
    assert abs(np.linalg.norm(vector) - 1) > 1e-3


@pytest.mark.parametrize("task", [None, "embed", "token_embed"])
def test_pooling_of_an_embedder(embedder: Pair, task: str | None) -> None:
    params = PoolingParams(task=task, dimensions=16, normalize=False)
    expected = [output.outputs.data for output in embedder.llm.encode(TEXTS, params, use_tqdm=False)]
    asked: dict[str, Any] = {"input": TEXTS, "dimensions": 16, "use_activation": False}
    if task is not None:
        asked["task"] = task
    plain = embedder.post("/pooling", model="m", **asked).json()
    assert plain["object"] == "list" and plain["id"].startswith("pooling-") and plain["usage"]["total_tokens"] > 0
    assert [(one["index"], one["object"]) for one in plain["data"]] == [(0, "pooling"), (1, "pooling"), (2, "pooling")]
    for one, vectors in zip(plain["data"], expected, strict=True):
        close(one["data"], vectors)
    raw = embedder.post("/pooling", **asked, encoding_format="bytes", endianness="big")
    assert raw.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(raw.headers["metadata"])
    for one, vectors in zip(metadata["data"], expected, strict=True):
        assert (one["embed_dtype"], one["endianness"], one["shape"]) == ("float32", "big", list(vectors.shape))
        found = np.frombuffer(raw.content[one["start"] : one["end"]], ">f4")
        close(found.reshape(one["shape"]), vectors)
    assert metadata["usage"] == plain["usage"] and metadata["data"][-1]["end"] == len(raw.content)
    bare = embedder.post("/pooling", **asked, encoding_format="bytes_only", endianness="big")
    assert bare.content == raw.content and "metadata" not in bare.headers


def test_numbers_of_half_size(embedder: Pair) -> None:
    expected = embedder.llm.embed("x", use_tqdm=False)[0].outputs.embedding
    asked: dict[str, Any] = {"input": "x", "encoding_format": "base64", "embed_dtype": "float16"}
    vector = np.frombuffer(
        base64.b64decode(embedder.post("/v1/embeddings", **asked).json()["data"][0]["embedding"]), "<f2"
    )
    np.testing.assert_array_equal(vector, np.asarray(expected).astype("f2"))


def test_pooling_of_a_classifier(classifier: Pair) -> None:
    for activation in (None, False):
        body = {} if activation is None else {"use_activation": activation}
        params = PoolingParams(use_activation=activation)
        outputs = classifier.llm.encode(TEXTS, params, use_tqdm=False)
        for task in ({}, {"task": "classify"}):
            answer = classifier.post("/pooling", input=TEXTS, **body, **task).json()
            for one, output in zip(answer["data"], outputs, strict=True):
                close(one["data"], output.outputs.data)
    for task in ("token_embed", "token_classify"):
        assert classifier.post("/pooling", input="x", task=task).status_code == 400
    no_template = classifier.post("/pooling", messages=CHAT).json()["error"]
    assert "chat template" in no_template["message"]


def test_conversations_that_are_pooled(embedder: Pair) -> None:
    """The prompt is what `/tokenize` tells of the same conversation."""
    more = [*CHAT, {"role": "assistant", "content": "Indeed"}]
    for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        for body in (
            {"messages": CHAT, "add_generation_prompt": False},
            {"messages": CHAT, "add_generation_prompt": True},
            {"messages": more, "continue_final_message": True},
            {"messages": CHAT, "add_generation_prompt": False, "add_special_tokens": True},
        ):
            ids = embedder.post("/tokenize", **body).json()["tokens"]
            asked = {name: value for name, value in body.items() if value is not False}
            found = embedder.post(path, **asked).json()
            expected = embedder.post(path, input=[ids]).json()
            close(found["data"][0][field], expected["data"][0][field])
            assert found["usage"]["prompt_tokens"] == len(ids)
    cut = embedder.post("/pooling", messages=CHAT, truncate_prompt_tokens=4).json()
    assert cut["usage"]["prompt_tokens"] == 4


def test_special_tokens(crosser: Pair, classifier: Pair) -> None:
    for special in (True, False):
        answer = classifier.post("/classify", input=["ab"], add_special_tokens=special).json()
        assert answer["usage"]["prompt_tokens"] == (4 if special else 2)
    refused = classifier.post("/classify", input=[[5, 6]], add_special_tokens=False)
    assert refused.status_code == 400 and "token ids are taken as they are" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": "x", "truncation_side": "left"}, "truncation_side", "not supported"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "'float', 'base64'"),
        ("/v1/embeddings", {"input": []}, "input", "send 1 to 2048"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input", "2049 prompts"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, None, "no token to begin with"),
        ("/v1/embeddings", {"input": [10**9]}, None, "vocabulary ends at"),
        ("/v1/embeddings", {}, None, "send input or messages, one of them"),
        ("/v1/embeddings", {"input": "x", "priority": 1}, "priority", "does not order by it"),
        ("/v1/embeddings", {"input": "x", "model": "other"}, "model", "does not exist"),
        ("/v1/embeddings", {"input": "x", "messages": CHAT}, None, "send input or messages, one of them"),
        (
            "/v1/embeddings",
            {"input": "x", "add_generation_prompt": True},
            None,
            "add_generation_prompt is for messages",
        ),
        ("/v1/embeddings", {"input": "x", "endianness": "big"}, None, "are for bytes"),
        ("/v1/embeddings", {"input": ["x"] * 900, "encoding_format": "bytes"}, "encoding_format", "'bytes_only'"),
        ("/v1/embeddings", {"messages": []}, "messages", "send at least one"),
        ("/v1/embeddings", {"messages": [{"role": "usr", "content": "x"}]}, "messages", "did you mean 'user'"),
        ("/pooling", {"input": "x", "task": "classify"}, None, "it has no classification head; ask for embed"),
        ("/pooling", {"input": "x", "task": "classifying"}, "task", "there is no such one; use 'embed'"),
        ("/pooling", {"input": "x", "task": "token_classify"}, None, "it has no classification head; ask for embed"),
        ("/pooling", {"data": {"image": "x"}}, "data", "not supported"),
        ("/classify", {"input": "x"}, None, "it has no classification head; ask for embed"),
        ("/score", {"text_1": "x"}, None, "text_2 is missing"),
        ("/score", {}, None, "send text_1 and text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, None, "mean the same"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, None, "they cannot be paired"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation", "are cosines"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "send 1 to 2048"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}, "max_tokens_per_doc", "not supported"),
        ("/v1/completions", {"prompt": "x"}, None, "this engine was started to pool"),
    ],
)
def test_what_is_refused(embedder: Pair, path: str, body: dict[str, Any], param: str | None, says: str) -> None:
    answer = embedder.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert says in error["message"] and error["param"] == param


def test_a_chat_engine_does_not_pool(server: Server) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/classify", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ):
        answer = httpx.post(server.address + path, json=body, timeout=60)
        assert answer.status_code == 400
        assert 'start it with runner="pooling" (--runner pooling)' in answer.json()["error"]["message"]


def test_classify(classifier: Pair) -> None:
    for activation in (None, False):
        body = {} if activation is None else {"use_activation": activation}
        answer = classifier.post("/classify", model="m", input=TEXTS, **body).json()
        params = PoolingParams(use_activation=activation)
        outputs = classifier.llm.classify(TEXTS, params, use_tqdm=False)
        assert answer["object"] == "list" and answer["id"].startswith("classify-")
        for i, (one, output) in enumerate(zip(answer["data"], outputs, strict=True)):
            close(one["probs"], output.outputs.probs)
            assert one["index"] == i and one["num_classes"] == 3
            assert one["label"] == ("bad", "middling", "good")[int(np.argmax(output.outputs.probs))]
        assert answer["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    several = classifier.post("/score", text_1="x", text_2="y").json()["error"]
    assert "has 3 labels, a score is one number" in several["message"]


def scores(pair: Pair, first: Any, second: Any, **params: Any) -> list[float]:
    found = pair.llm.score(first, second, PoolingParams(**params), use_tqdm=False)
    return [one.outputs.score for one in found]


@pytest.mark.parametrize("which", ["embedder", "crosser"])
def test_score(which: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(which)
    for first, second in ((TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS), (TEXTS, TEXTS[::-1])):
        for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            answer = pair.post("/score", **dict(zip(names, (first, second), strict=True))).json()
            assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
            close([one["score"] for one in answer["data"]], scores(pair, first, second))
    assert pair.post("/v1/score", text_1="a", text_2="b").json()["data"][0]["object"] == "score"


@pytest.mark.parametrize("which", ["embedder", "crosser"])
def test_rerank(which: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(which)
    texts = [*TEXTS[1:], "Rain fell all night", "9 + 4 = 13"]
    expected = scores(pair, TEXTS[0], texts)
    order = sorted(range(4), key=lambda i: -expected[i])
    documents = [texts[0], {"text": texts[1]}, *texts[2:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = pair.post(path, model="m", query=TEXTS[0], documents=documents).json()
        assert [one["index"] for one in answer["results"]] == order
        close([one["relevance_score"] for one in answer["results"]], [expected[i] for i in order])
        shown = [one.get("document") for one in answer["results"]]
        assert shown == ([None] * 4 if path == "/v2/rerank" else [{"text": texts[i]} for i in order])
        assert answer["usage"]["total_tokens"] > 0 and answer["id"].startswith("rerank-")
    best = pair.post("/rerank", query=TEXTS[0], documents=documents, top_n=1, return_documents=False).json()
    assert [one["index"] for one in best["results"]] == order[:1] and "document" not in best["results"][0]


def test_scores_of_texts_that_are_cut(embedder: Pair, crosser: Pair) -> None:
    long = "happy " * 5000
    for pair in (embedder, crosser):
        for path, body in (
            ("/score", {"text_1": TEXTS[0], "text_2": long}),
            ("/rerank", RANKED | {"documents": [long]}),
        ):
            assert pair.post(path, **body).status_code == 400
            assert pair.post(path, **body, truncate_prompt_tokens=-1).status_code == 200
            assert pair.post(path, **body, truncate_prompt_tokens=0).status_code == 400
        for most in (-1, 9):
            answer = pair.post("/score", text_1=TEXTS[0], text_2=[long, TEXTS[1]], truncate_prompt_tokens=most).json()
            same = pair.llm.score(TEXTS[0], [long, TEXTS[1]], use_tqdm=False, truncate_prompt_tokens=most)
            close([one["score"] for one in answer["data"]], [one.outputs.score for one in same])
        for wrong in (0, -2, True, 1.5):
            with pytest.raises(InvalidRequestError, match="no number of tokens"):
                pair.llm.score("a", "b", use_tqdm=False, truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
        with pytest.raises(PromptTooLongError):
            pair.llm.score("a", long, use_tqdm=False)
    # Both texts of a pair together, the longer one first; alone each by itself.
    cut = crosser.post("/score", text_1=TEXTS[0], text_2=long, truncate_prompt_tokens=11).json()
    assert cut["usage"]["prompt_tokens"] == 11
    cut = embedder.post("/score", text_1=TEXTS[0], text_2=TEXTS[0] + long, truncate_prompt_tokens=3).json()
    assert cut["usage"]["prompt_tokens"] == 6 and cut["data"][0]["score"] > 0.999999, "both begin alike"


def test_a_cross_encoders_bare_logits(crosser: Pair) -> None:
    answer = crosser.post("/score", text_1=TEXTS[0], text_2=TEXTS, use_activation=False).json()
    close([one["score"] for one in answer["data"]], scores(crosser, TEXTS[0], TEXTS, use_activation=False))


def test_nothing_is_left_behind(embedder: Pair, classifier: Pair, crosser: Pair) -> None:
    for pair in (embedder, classifier, crosser):
        pair.server.until_idle()
