"""What pages are kept under beyond an engine: the same wherever they hold the same, another wherever they do not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.types.errors import CheckpointError
from engine.types.parallel import Parallel, Place
from engine.types.start import Choice, DraftStart, WorkerStart
from engine_kit.engine_identity import PLACES, WINDOW, engine_identity


@pytest.fixture
def start(tmp_path: Path) -> WorkerStart:
    """Of an engine with two files of weights."""
    start = launch(EngineConfig(model="dummy:tiny", dtype="float32")).start.worker
    for name, size in (("a", 3 * WINDOW * PLACES + 5), ("b", 7)):
        (tmp_path / name).write_bytes(bytes(range(251)) * (size // 251 + 1))
    return with_files(start, tmp_path)


def with_files(start: WorkerStart, folder: Path) -> WorkerStart:
    files = msgspec.structs.replace(start.files, weights=(str(folder / "a"), str(folder / "b")), folder=str(folder))
    return msgspec.structs.replace(start, files=files)


def changed(start: WorkerStart, name: str) -> WorkerStart:
    """The start message with one thing changed that pages depend on."""
    model, layout = start.model, start.layout
    group = msgspec.structs.replace(layout.groups[0], page_format="another")
    quantized = Choice(point="quantization", kind="linear", driver="int8", distribution="x", version="1", value="x:X")
    others: dict[str, Any] = {
        "model": msgspec.structs.replace(model, config=model.config | {"rope_theta": 7.0}),
        "dtype": "float64",
        "kv_cache_dtype": "float16",
        "layout": msgspec.structs.replace(layout, groups=(group, *layout.groups[1:])),
        "parallel": Parallel(tp=2),
        "choices": (*start.choices, quantized),
        "drafts": (DraftStart(choices=(), model=model, files=start.files),),
    }
    return msgspec.structs.replace(start, **{name: others[name]})


def test_weights_that_cannot_be_read_are_named(start: WorkerStart, tmp_path: Path) -> None:
    (tmp_path / "b").unlink()
    with pytest.raises(CheckpointError, match="identify the weights in .*b; No such file"):
        engine_identity(start)


def test_it_outlives_restarts(start: WorkerStart, tmp_path: Path) -> None:
    """The same for every rank, and from another folder."""
    first = engine_identity(start)
    assert len(first) == 32 and engine_identity(start) == first
    assert engine_identity(msgspec.structs.replace(start, place=Place(rank=1), num_kv_pages=99)) == first
    (tmp_path / "copy").mkdir()
    for name in "ab":
        shutil.copy(tmp_path / name, tmp_path / "copy")
    assert engine_identity(with_files(start, tmp_path / "copy")) == first


@pytest.mark.parametrize("name", ["model", "dtype", "kv_cache_dtype", "layout", "parallel", "choices", "drafts"])
def test_it_changes_with_whatever_pages_depend_on(start: WorkerStart, name: str) -> None:
    assert engine_identity(changed(start, name)) != engine_identity(start)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"0",
        lambda data: b"0" + data[1:],
        lambda data: data[:-1] + b"0",
        lambda data: bytes(255 - byte for byte in data),
    ],
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_it_changes_with_the_weights(
    start: WorkerStart, tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    first = engine_identity(start)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    assert engine_identity(start) != first


def test_it_changes_with_weights_that_are_in_no_file(start: WorkerStart) -> None:
    """They are the driver's, its options' and the name's; models of one config may store keys in other orders."""
    plain = msgspec.structs.replace(start, files=msgspec.structs.replace(start.files, weights=()))
    others = [msgspec.structs.replace(plain, files=msgspec.structs.replace(plain.files, name="dummy:other"))]
    for point in ("checkpoint", "model"):
        choices = [
            msgspec.structs.replace(choice, options={"seed": 7}) if choice.point == point else choice
            for choice in plain.choices
        ]
        others.append(msgspec.structs.replace(plain, choices=tuple(choices)))
    assert len({engine_identity(one) for one in (plain, *others)}) == 4


def test_kv_dtype_is_the_models_where_none_is_named(start: WorkerStart) -> None:
    named = msgspec.structs.replace(start, kv_cache_dtype="float32")
    assert engine_identity(named) == engine_identity(msgspec.structs.replace(start, kv_cache_dtype=None))
