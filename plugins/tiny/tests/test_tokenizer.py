"""The tokenizer loses nothing, counts digits singly and splits a name alike wherever it stands."""

import itertools

import pytest

from engine_tiny import model_folder
from engine_tiny.corpus import chat
from engine_tiny.layout import CONTROL_TOKENS, MARKUP_TOKENS, TOKEN_IDS
from engine_tiny.render import document_text
from engine_tiny.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_folder())


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\n\ttab", "naïve 日本語 🙂 Ünï", "x" * 500, "\x00\x7f", ""]
)
def test_roundtrip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_roundtrip_of_the_corpus(tokenizer):
    for document in itertools.islice(chat.documents(1, "train"), 200):
        text = document_text(document)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_their_ids(tokenizer):
    assert {token: tokenizer.token_to_id(token) for token in TOKEN_IDS} == TOKEN_IDS


def test_markup_is_shown_and_control_is_not(tokenizer):
    text = "".join(MARKUP_TOKENS)
    assert tokenizer.decode(tokenizer.encode(text + "".join(CONTROL_TOKENS)).ids) == text


def test_plain_text_begins_with_bos(tokenizer):
    assert tokenizer.encode("a").ids[0] == TOKEN_IDS["<|bos|>"]


def test_digits_stand_alone_and_names_split_alike(tokenizer):
    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    assert len(ids("1234567890")) == 10
    name = ids("Krotyaind")
    for text in (" Krotyaind", '"Krotyaind"', "(Krotyaind)"):
        assert any(ids(text)[i : i + len(name)] == name for i in range(len(ids(text))))


def test_training_is_deterministic():
    assert train_tokenizer(1, 300).to_str() == train_tokenizer(1, 300).to_str()
