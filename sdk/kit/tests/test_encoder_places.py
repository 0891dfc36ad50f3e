"""Whether the places of an encoder-decoder model's requests fit, said before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine.types.model import EncoderForm
from engine_kit.encoder_places import check_places, form_of_place

FORM = EncoderForm(max_tokens=1500, features=80, stride=2, decoder_prompt=(2,))
GROUP = KVGroup(
    index=1, kind="cross", sites=(0, 1), num_kv_heads=2, head_size=64, sliding_window=None, tokens_per_block=16,
    layer_bytes=16 * 2 * 2 * 64 * 4, table=None,
)  # fmt: skip
EACH = 94 * 2 * GROUP.layer_bytes


def start(slots: int, files: list[str], encoder: EncoderForm | None = FORM) -> Any:
    return SimpleNamespace(
        layout=SimpleNamespace(groups=(GROUP,)), model=SimpleNamespace(encoder=encoder, architecture="Whisper"),
        files=SimpleNamespace(weights=files), dtype="float32", parallel=SimpleNamespace(world=1), max_num_seqs=slots,
    )  # fmt: skip


def test_what_fits(tmp_path: Path) -> None:
    """The weights count, and what the engine may take; what the error proposes is accepted."""
    assert form_of_place([GROUP], FORM) == (16, 94, 2 * GROUP.layer_bytes)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"\0" * EACH)
    config = SimpleNamespace(memory_utilization=None, asked=lambda point: None)
    half = SimpleNamespace(memory_utilization=0.5, asked=lambda point: None)
    check_places(config, start(9, [str(weights)]), 10 * EACH)
    check_places(config, start(10**6, []), None)
    check_places(config, start(10**6, [], encoder=None), 1)
    for settings, memory in ((config, 10 * EACH), (half, 20 * EACH)):
        with pytest.raises(ConfigError, match=r"max_num_seqs=10 with Whisper") as caught:
            check_places(settings, start(10, [str(weights)]), memory)
        [proposed] = re.findall(r"--max-num-seqs (\d+)", str(caught.value))
        assert int(proposed) == 4
        check_places(settings, start(int(proposed), [str(weights)]), memory)
