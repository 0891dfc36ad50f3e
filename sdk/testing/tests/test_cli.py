"""`engine plugins test`: what there is no suite for is said so, with what to do instead."""

from __future__ import annotations

import json

import pytest

from engine.cli.main import main


@pytest.mark.parametrize(
    ("point", "found", "remedy"),
    [
        ("hooks", "there is no suite for it", "run its own tests"),
        ("atention", "there is no such point", "did you mean 'attention'"),
        ("zzz", "there is no such point", "there are suites for: attention"),
    ],
)
def test_a_point_without_a_suite(capsys, point, found, remedy):
    assert main(["plugins", "test", point, "mine"]) == 2
    said = capsys.readouterr().err
    assert f"error: test a driver of point '{point}'" in said and found in said and remedy in said


def test_a_model_is_tested_with_a_config_of_the_users(capsys, tmp_path):
    """Here one that the card refuses."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**sizes, "intermediate_size": 32, "max_position_embeddings": 32, "hidden_act": "tanh"}))
    command = ["plugins", "test", "model", "LlamaForCausalLM", "--model-config", str(file), "-k"]
    assert main([*command, "test_decode"]) == 1
    assert "hidden_act 'tanh' is not 'silu'" in capsys.readouterr().out
    assert main([*command, "describe_agrees"]) == 0


@pytest.mark.parametrize(
    ("point", "text", "found"),
    [
        ("model", "[1]", "it holds a list, not an object"),
        ("model", "{", "Expecting property name"),
        ("model", None, "No such file"),
        ("evictor", "{}", "only models have a config.json"),
    ],
)
def test_a_config_that_is_none(capsys, tmp_path, point, text, found):
    file = tmp_path / "small.json"
    if text is not None:
        file.write_text(text)
    driver = "LlamaForCausalLM" if point == "model" else "lru"
    assert main(["plugins", "test", point, driver, f"--model-config={file}"]) == 2
    assert found in capsys.readouterr().err
