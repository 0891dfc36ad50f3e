"""The suite of point `checkpoint`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

import msgspec
import numpy as np
import pytest
import torch

from engine.interfaces.checkpoint import Checkpoint, CheckpointCard
from engine.interfaces.context import WorkerContext
from engine.types.errors import CheckpointError, ModelNotFoundError
from engine.types.model import CheckpointFiles
from engine.types.pooling import PoolerConfig
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.core_contexts import start_message

ABSENT = "/nowhere/there-is-no-such-model"
FOREIGN = ("", "nobody-has-this://model", "\x00", "a" * 5000)
"""Names that no driver opens."""
_SAFE = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointConformance(Conformance):
    """A name is claimed, found and read, whole and each time alike; what is broken is said by file.

    Attributes:
        model: a name that the driver opens. It may be left out where the card has a `default_model`.
    """

    point = "checkpoint"
    protocol = "Checkpoint"
    model: ClassVar[str] = ""

    @classmethod
    def needs(cls) -> Sequence[None]:
        return [None]

    @classmethod
    def described(cls) -> type[CheckpointCard]:
        """The card, as what it is."""
        return cast("type[CheckpointCard]", cls.subject().card)

    @classmethod
    def name(cls) -> str:
        """The model to open."""
        found = cls.model or cls.described().default_model
        if not found:
            pytest.skip('the suite names no model: set model = "..." to a name that the driver opens')
        return found

    @classmethod
    def files(cls) -> CheckpointFiles:
        """What the card found."""
        return cls.described().resolve(cls.name())

    @classmethod
    def reader(cls, files: CheckpointFiles) -> Checkpoint:
        """A body that reads these."""
        start = msgspec.structs.replace(start_message(), files=files)
        return cls.body()(WorkerContext(start=start, options=cls.subject().options))  # type: ignore[no-any-return]

    # -- names -------------------------------------------------------------------------------------------------------
    def test_claims(self) -> None:
        """True for its own, False for what nobody opens; pure. A default model is its own."""
        card, name = self.described(), self.name()
        assert card.claims(name) is True and card.claims(name) is True
        for foreign in FOREIGN:
            assert card.claims(foreign) is False, f"it claims {foreign[:40]!r}"
        if card.default_model is not None:
            assert card.claims(card.default_model) is True

    def test_what_is_not_there(self) -> None:
        """A claimed name without a model: a typed error that names it."""
        card = self.described()
        if not card.claims(ABSENT):
            not_served("it does not claim paths")
        with pytest.raises(ModelNotFoundError, match=ABSENT):
            card.resolve(ABSENT)

    def test_files(self) -> None:
        """A config with an architecture, a folder or file that is there, and files of weights that are; they travel as
        they are."""
        name, files = self.name(), self.files()
        assert files.name == name
        architectures = files.config.get("architectures")
        assert isinstance(architectures, list) and all(isinstance(a, str) for a in architectures) and architectures
        assert Path(files.folder).exists()
        missing = [file for file in files.weights if not Path(file).is_file()]
        assert not missing, f"files that are not there: {missing}"
        assert len(set(files.weights)) == len(files.weights)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(files), type=CheckpointFiles) == files
        assert self.files() == files, "resolved again, it finds others"

    def test_pooler(self) -> None:
        """None, or how to pool, the same each time. The head and its labels are the model's own."""
        card, files = self.described(), self.files()
        default = PoolerConfig(num_labels=3, activation="sigmoid")
        found = card.pooler(files, default)
        assert found == card.pooler(files, default)
        assert found is None or (found.num_labels, found.activation) == (3, "sigmoid")

    # -- tensors -----------------------------------------------------------------------------------------------------
    def test_tensors(self) -> None:
        """Each name once, tensors on the host, as many as there are; the same each time, and from two readers."""
        reader, files = self.reader(self.files()), self.files()
        first = {}
        for name, tensor in reader.weights():
            assert isinstance(name, str) and name not in first, f"{name} comes twice"
            assert tensor.device.type == "cpu"
            first[name] = _sum(tensor)
        assert first
        assert {name: _sum(tensor) for name, tensor in reader.weights()} == first, "read again, it gives others"
        assert {name: _sum(tensor) for name, tensor in self.reader(files).weights()} == first

    def test_tensors_are_those_of_the_files(self) -> None:
        """Beside what the files themselves say: names, dtypes, shapes and bytes, read without the driver."""
        files = self.files()
        if not files.weights or not all(file.endswith(".safetensors") for file in files.weights):
            pytest.skip("its weights are no safetensors files, which the suite can read for itself")
        expected = {name: found for file in files.weights for name, found in _read(Path(file)).items()}
        given = {}
        for name, tensor in self.reader(files).weights():
            dtype, shape, data = expected[name]
            assert tensor.dtype == dtype and tuple(tensor.shape) == shape, f"{name} is {tensor.dtype} {tensor.shape}"
            assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data, f"{name} has other numbers"
            given[name] = True
        assert given.keys() == expected.keys(), f"left out: {sorted(expected.keys() - given.keys())[:5]}"

    @pytest.mark.parametrize("left", [0.0, 0.5, 0.999])
    def test_a_truncated_file(self, left: float, tmp_path: Path) -> None:
        """A typed error that names it, not half a model."""
        files = self.files()
        if not files.weights:
            not_served("it reads no files")
        broken = tmp_path / Path(files.weights[-1]).name
        shutil.copy(files.weights[-1], broken)
        with open(broken, "r+b") as file:
            file.truncate(int(broken.stat().st_size * left))
        cut = msgspec.structs.replace(files, weights=(*files.weights[:-1], str(broken)))
        with pytest.raises(CheckpointError, match=broken.name):
            for _ in self.reader(cut).weights():
                pass

    def test_a_missing_file(self, tmp_path: Path) -> None:
        """It went between the look and the reading."""
        files = self.files()
        if not files.weights:
            not_served("it reads no files")
        gone = msgspec.structs.replace(files, weights=(*files.weights[:-1], str(tmp_path / "gone.safetensors")))
        with pytest.raises(CheckpointError, match="gone"):
            for _ in self.reader(gone).weights():
                pass

    @classmethod
    def figure(cls) -> str | None:
        """How fast tensors come."""
        files = cls.files()
        start, moved = time.perf_counter(), 0
        for _, tensor in cls.reader(files).weights():
            moved += tensor.clone().nbytes
        seconds = time.perf_counter() - start
        return f"{moved / 1e6:,.1f} MB read and copied in {seconds * 1e3:,.1f} ms, {moved / seconds / 1e9:.2f} GB/s"


def _sum(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), hash(data.tobytes())


def _read(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """A safetensors file, by its format: 8 bytes of length, a JSON header, the data."""
    data = path.read_bytes()
    length = int(np.frombuffer(data[:8], "<u8")[0])
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            found[name] = (_SAFE[entry["dtype"]], tuple(entry["shape"]), data[8 + length + start : 8 + length + stop])
    return found
