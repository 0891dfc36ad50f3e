"""How the files of sentence-transformers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedModelError
from engine.types.pooling import PoolerConfig
from engine_kit.hf_folder import read_pooler

DEFAULT = PoolerConfig(pooling_type="cls", normalize=True)


def write(folder: Path, kinds: tuple[str, ...], pooling: Any = None, settings: Any = None) -> Path:
    modules = [{"idx": i, "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if settings is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    return folder


def test_no_files(tmp_path: Path) -> None:
    assert read_pooler(tmp_path, DEFAULT) is None


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 384}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
    ids=str,
)
@pytest.mark.parametrize("scaled", [True, False])
def test_pooling(tmp_path: Path, pooling: dict[str, Any], expected: str, scaled: bool) -> None:
    """A chain without Normalize does not scale, whatever the architecture's default is."""
    kinds = ("Transformer", "Pooling", "Normalize")
    found = read_pooler(write(tmp_path, kinds if scaled else kinds[:2], pooling), DEFAULT)
    assert found == PoolerConfig(pooling_type=expected, normalize=scaled)  # type: ignore[arg-type]


def test_settings_of_the_transformer(tmp_path: Path) -> None:
    settings = {"max_seq_length": 128, "do_lower_case": True}
    found = read_pooler(
        write(tmp_path, ("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, settings), DEFAULT
    )
    assert found is not None and (found.max_tokens, found.lower_case) == (128, True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_cls_token": True}, "it names a module 'Dense'"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "it chooses pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "it chooses pooling_mode_weightedmean"),
        (("Transformer", "Pooling"), {}, "it chooses nothing"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "it chooses pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
    ],
    ids=str,
)
def test_what_is_not_served(tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_pooler(write(tmp_path, kinds, pooling), DEFAULT)
    assert message in str(caught.value)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_pooler(write(tmp_path, ("Transformer", "Pooling")), DEFAULT)
    for text in ("{", "{}", "[1]"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match="it is no"):
            read_pooler(tmp_path, DEFAULT)


def test_lower_case_reaches_the_tokenizer(tmp_path: Path) -> None:
    from pooling_models import encoder_checkpoint

    from engine import LLM

    encoder_checkpoint(tmp_path, "BertModel")
    write(tmp_path, ("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, {"do_lower_case": True})
    with LLM(tmp_path, max_num_seqs=2) as llm:
        upper, lower = llm.embed(["HELLO", "hello"], use_tqdm=False)
    assert upper.prompt_token_ids == lower.prompt_token_ids
