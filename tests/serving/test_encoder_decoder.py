"""A server with an encoder-decoder model: `prompt` of a completion is what the encoder reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import BartConfig, BartForConditionalGeneration

from tests.serving.conftest import Server

sys.path.append(str(Path(__file__).parents[2] / "plugins" / "reference" / "tests" / "parity"))

from checkpoints import VOCAB_SIZE, tokenizer

PROMPTS = [[7, 12, 30, 9, 2], [40, 5, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A tiny random BART, and transformers' greedy answers to the prompts."""
    folder = tmp_path_factory.mktemp("bart")
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.5,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    found = [model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6)[0, 1:].tolist() for ids in PROMPTS]
    return folder, found


def test_completions(folder: tuple[Path, list[list[int]]]) -> None:
    """Whole and streamed, several at once; an input that is too long is a 400."""
    server = Server(str(folder[0]), "--served-model-name", "bart", "--dtype", "float32", "--max-num-seqs", "4")
    try:
        with OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": "bart", "temperature": 0, "max_tokens": 6}
            more = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(prompt=PROMPTS, extra_body=more, **asked)
            assert [choice.token_ids for choice in answer.choices] == folder[1]
            assert answer.usage.prompt_tokens == 2, "of the decoders"
            parts = client.completions.create(prompt=PROMPTS[0], stream=True, extra_body=more, **asked)
            assert [token for part in parts for token in part.choices[0].token_ids or []] == folder[1][0]
            with pytest.raises(BadRequestError, match="65 tokens for the encoder"):
                client.completions.create(prompt=[5] * 65, **asked)
    finally:
        assert server.stop() == 0, "".join(server.lines)
