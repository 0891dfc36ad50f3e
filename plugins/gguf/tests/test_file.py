"""Files that are whole, in parts, broken, or of another kind."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_maker import byte_vocabulary, tiny_model, write

from engine.types.errors import CheckpointError, EngineError, ModelNotFoundError, UnsupportedModelError
from engine_gguf import file
from engine_gguf.architectures import config_of
from engine_gguf.card import GGUFCheckpoint
from engine_gguf.file import read_file
from engine_gguf.parts import files_of, read_model
from engine_gguf.vocabulary import tokenizer_json
from engine_gguf.weights import GGUFWeights


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("LlamaForCausalLM", layers=1)
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", model, "Q8_0", vocabulary=byte_vocabulary("{{ 1 }}"))


def small(path: Path, **more: object) -> Path:
    """A file with a few keys and tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list(["a", "b"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("half", 0.5)
    writer.add_tensor("one.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("two.weight", np.zeros((2, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_ggmls_reader_reads(whole: Path) -> None:
    found, theirs = read_file(whole, lambda key: True), gguf.GGUFReader(whole)
    assert set(found.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        ours = found.tensors[tensor.name]
        assert (ours.start, ours.size) == (tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(int(n) for n in tensor.shape[::-1]) and ours.type == tensor.tensor_type.name
    assert found.metadata["general.architecture"] == "llama"
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 272
    assert "tokenizer.ggml.tokens" not in read_file(whole).metadata


def test_names(whole: Path, tmp_path: Path) -> None:
    claims = GGUFCheckpoint.claims
    assert claims("x.gguf") and claims("/a/b.GGUF") and claims(str(whole.parent))
    assert not any(claims(name) for name in ("", "x", "org/x", "x.safetensors", "s3://a/b.gguf", str(tmp_path)))
    files = GGUFCheckpoint.resolve(str(whole.parent))
    assert files.weights == (str(whole),) and files.folder == str(whole)
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert set(files.config["quantization_config"]["types"].values()) == {"Q8_0"}
    assert files.generation_config == {"eos_token_id": [256]}
    with pytest.raises(ModelNotFoundError, match="has model.gguf"):
        GGUFCheckpoint.resolve(str(whole.with_name("other.gguf")))
    for name in ("a.gguf", "b.gguf"):
        small(tmp_path / name)
    with pytest.raises(ModelNotFoundError, match=r"2 models: a\.gguf, b\.gguf"):
        GGUFCheckpoint.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert not claims(str(tmp_path)), "a folder of another driver's"


def test_where_a_text_ends(tmp_path: Path) -> None:
    """By the keys, and by the names of tokens that end a turn; and how it is to be sampled."""

    def put(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "<|im_end|>", "<|endoftext|>", "<eos>"])
        writer.add_eot_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    model = tiny_model("Qwen2ForCausalLM", layers=1, eos_token_id=3)
    path = write(tmp_path / "x.gguf", model, "Q8_0", vocabulary=put)
    expected = {"eos_token_id": [3, 1, 2], "temperature": 0.5, "top_k": 20}
    assert GGUFCheckpoint.resolve(str(path)).generation_config == expected


def test_parts(tmp_path: Path) -> None:
    """Found from any of them; missing ones, and wrong numbers, are named."""
    first = write(tmp_path / "model.gguf", tiny_model("LlamaForCausalLM"), "Q4_0", parts=3)
    files = files_of(first)
    assert len(files) == 3 and files_of(files[2]) == files
    assert len(read_model(files).tensors) == 21
    assert GGUFCheckpoint.resolve(str(tmp_path)).weights == tuple(map(str, files))
    files[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"1 are missing: model-00002-of-00003\.gguf"):
        GGUFCheckpoint.resolve(str(first))
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(CheckpointError, match="part 3 of 3, and by its name it is 2 of 3"):
        GGUFCheckpoint.resolve(str(first))
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="part 1 of 3, and by its name it is 1 of 1"):
        GGUFCheckpoint.resolve(str(alone))


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (0, b"GGML", "begins with b'GGML'"),
        (4, struct.pack("<I", 1), "version 1, served are 2 and 3"),
        (4, struct.pack(">I", 3), "big endian"),
        (8, struct.pack("<Q", 1 << 60), "too small"),
        (16, struct.pack("<Q", 1 << 60), "too small"),
        (24, struct.pack("<Q", 1 << 62), "too small"),
    ],
)
def test_what_is_no_file_of_this_kind(tmp_path: Path, at: int, data: bytes, said: str) -> None:
    path = small(tmp_path / "x.gguf")
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_file(path)
    assert str(path) in str(caught.value) and caught.value.remedy


def test_types_that_are_not_served(tmp_path: Path) -> None:
    path = small(tmp_path / "x.gguf")
    content = path.read_bytes()
    for number, said in ((16, r"IQ2_XXS \(16\)"), (99, "type 99")):
        at = content.index(b"two.weight") + 10 + 4 + 16
        path.write_bytes(content[:at] + struct.pack("<I", number) + content[at + 4 :])
        with pytest.raises(CheckpointError, match=said):
            read_file(path)


def test_a_file_that_is_cut_anywhere(tmp_path: Path) -> None:
    content = small(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end = max(tensor.start + tensor.size for tensor in read_file(tmp_path / "x.gguf").tensors.values())
    for size in range(end):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_file(path, lambda key: True)
    path.write_bytes(content)
    read_file(path)


MOST = 1 << 20
"""Bytes that reading such a file takes at once, at most; one that is whole takes a quarter."""


def damaged(whole: Path, path: Path, count: int) -> None:
    """Bytes of the metadata are changed at random: an error of ours, or a file that can be read; and no memory is asked
    for that the file does not fill, for whichever of them: numpy's and Python's, touched or not."""
    content, rng = whole.read_bytes(), random.Random(0)
    head = 16384  # the metadata and the list of tensors
    GGUFCheckpoint.resolve(str(whole))  # what is imported, and kept for good, is no file's
    tokenizer_json(read_file(whole, lambda key: True))
    tracemalloc.start()
    try:
        for number in range(count):
            broken = bytearray(content[:head])
            for _ in range(rng.choice((1, 1, 2, 8))):
                broken[rng.randrange(head)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            path.write_bytes(bytes(broken) + content[head : head + rng.choice((0, len(content)))])
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(EngineError):
                GGUFCheckpoint.resolve(str(path))
                tokenizer_json(read_file(path, lambda key: True))
            asked = tracemalloc.get_traced_memory()[1] - before
            assert asked < MOST, f"{asked:,} bytes were asked for, for file {number} of {path.stat().st_size:,}"
    finally:
        tracemalloc.stop()


class Trusting(file._Reader):
    """Makes room for what the file says, and then looks whether it is there."""

    def count(self, what: str, least: int) -> int:
        start = self.at
        said = self.number("<Q", 8, what)
        room = np.empty(min(said * least, 1 << 26), np.uint8)
        self.at = start
        return super().count(what, least) if len(room) else 0


def test_room_that_is_made_too_early_is_noticed(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_Reader", Trusting)
    with pytest.raises(AssertionError, match="bytes were asked for, for file"):
        damaged(whole, tmp_path / "damaged.gguf", 150)


def test_damaged_files(whole: Path, tmp_path: Path) -> None:
    damaged(whole, tmp_path / "damaged.gguf", 150)


@pytest.mark.slow
def test_ten_thousand_damaged_files(whole: Path, tmp_path: Path) -> None:
    damaged(whole, tmp_path / "damaged.gguf", 10_000)


KEYS = (
    "split.no", "split.count", "split.tensors.count", "general.architecture", "general.alignment",
    "gemma3.attention.head_count", "gemma3.attention.head_count_kv", "gemma3.attention.key_length",
    "gemma3.attention.value_length", "gemma3.attention.sliding_window_pattern", "gemma3.final_logit_softcapping",
    "gemma3.attention.layer_norm_rms_epsilon", "gemma3.embedding_length", "gemma3.block_count",
    "gemma3.feed_forward_length", "gemma3.context_length", "gemma3.rope.freq_base", "gemma3.rope.dimension_count",
    "gemma3.rope.scaling.type", "tokenizer.ggml.eos_token_id",
)  # fmt: skip
HARMLESS = {
    ("split.no", 0), ("split.count", 0), ("tokenizer.ggml.eos_token_id", 0), ("gemma3.block_count", 0),
    ("gemma3.attention.sliding_window_pattern", 0), ("gemma3.attention.sliding_window_pattern", (1, 2)),
    ("gemma3.feed_forward_length", 0), ("gemma3.context_length", 0), ("gemma3.embedding_length", 0),
    ("tokenizer.ggml.eos_token_id", (1, 2)),
}  # fmt: skip
"""An architecture's own, one that says nothing, or one that the model's config is held to later."""


@pytest.mark.parametrize("value", ["text", (1, 2), 0])
@pytest.mark.parametrize("key", KEYS)
def test_keys_of_other_types(key: str, value: Any, tmp_path: Path) -> None:
    """An error that names the file, and not whatever Python says."""
    path = tmp_path / "x.gguf"
    metadata: dict[str, Any] = {
        "general.architecture": "gemma3", "gemma3.attention.head_count": 2, "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 16, "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.embedding_length": 32, "gemma3.block_count": 1, "gemma3.feed_forward_length": 32,
        "gemma3.context_length": 64, "gemma3.attention.sliding_window": 8,
    }  # fmt: skip
    assert config_of(read_model((keyed(path, metadata),)))
    keyed(path, metadata | {key: value})
    if (key, value) in HARMLESS:
        assert GGUFCheckpoint.resolve(str(path)).config
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"x\.gguf"):
        GGUFCheckpoint.resolve(str(path))


def test_rows_that_are_no_pairs_for_each_head(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4}
    path = keyed(tmp_path / "x.gguf", metadata, **{"blk.0.attn_q.weight": np.zeros((12, 32), np.float32)})
    files, model = SimpleNamespace(weights=(str(path),), config={}), SimpleNamespace(config={})
    start = SimpleNamespace(files=files, model=model, dtype="float32", choices=())
    context: Any = SimpleNamespace(start=start)
    with pytest.raises(CheckpointError, match=r"attn_q\.weight of .*its 12 rows are no pairs"):
        list(GGUFWeights(context).weights())


def keyed(path: Path, metadata: dict[str, Any], **tensors: np.ndarray) -> Path:
    """A file with these keys, an embedding, and more tensors."""
    writer = gguf.GGUFWriter(str(path), "x")
    writer.kv_data[0].clear()  # the architecture, which is one of the keys
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, tuple):
            writer.add_array(key, list(value))
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in {"token_embd.weight": np.zeros((4, 32), np.float32), **tensors}.items():
        writer.add_tensor(name, tensor)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({LONG: [1.0] * 8}, "it has one alone"),
        ({SHORT: [1.0] * 8}, "has no tensor rope_factors_long"),
        ({}, "has no tensor rope_factors_long"),
        ({LONG: [1.0] * 8, SHORT: [1.0] * 7}, r"rope_factors_short\.weight .*not 8 positive ones"),
        ({LONG: [1.0] * 7 + [0.0], SHORT: [1.0] * 8}, "not 8 positive ones"),
        ({LONG: [1.0] * 8, SHORT: [1.0] * 7 + [float("nan")]}, "not 8 positive ones"),
    ],
)
def test_factors_of_frequencies(tensors: dict[str, list[float]], said: str, tmp_path: Path) -> None:
    """One for each frequency, positive, and both of them."""
    metadata: dict[str, Any] = {
        "general.architecture": "phi3", "phi3.attention.head_count": 2, "phi3.embedding_length": 32,
        "phi3.attention.layer_norm_rms_epsilon": 1e-6, "phi3.block_count": 1, "phi3.feed_forward_length": 32,
        "phi3.context_length": 64, "phi3.rope.scaling.type": "longrope",
        "phi3.rope.scaling.original_context_length": 32,
    }  # fmt: skip
    sound = {name: np.ones(8, np.float32) for name in (LONG, SHORT)}
    rope = config_of(read_model((keyed(tmp_path / "sound.gguf", metadata, **sound),)))["rope_parameters"]
    assert rope["long_factor"] == [1.0] * 8
    given = {name: np.array(values, np.float32) for name, values in tensors.items()}
    path = keyed(tmp_path / "x.gguf", metadata, **given)
    with pytest.raises(CheckpointError, match=said):
        config_of(read_model((path,)))


def test_architectures_that_are_not_served(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*served are llama, qwen2"):
        GGUFCheckpoint.resolve(str(tmp_path / "x.gguf"))


def test_keys_that_are_missing(tmp_path: Path) -> None:
    path = small(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        GGUFCheckpoint.resolve(str(path))
