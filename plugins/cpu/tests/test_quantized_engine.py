"""The engine with drivers `int8` and `int4`, as a user chooses them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine import LLM, SamplingParams
from engine.types.errors import UnfitDriverError
from engine_reference.checkpoint_dummy.sizes import config_of, shapes_of

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_pages": 60, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
TEXTS = ["Once upon a time", "What is the capital of France? Tell me in one word, please."]
ROUNDED = {
    "int8": {"quantization": "absmax"},
    "int4": {"quantization": "linear=absmax", "quantization.bits": 4, "quantization.group_size": 32},
}
"""The same weights, multiplied in float64 by the core's reference driver (int4's head has 8 bits, nearly plain)."""


def answers(prompts: list[Any], **settings: Any) -> list[Any]:
    with LLM(**SETTINGS | settings) as llm:
        return llm.generate(prompts, GREEDY, use_tqdm=False)


def scores(output: Any) -> np.ndarray:
    """The log probabilities of the prompt's own tokens: of one text, whatever is drawn behind it."""
    tokens = output.prompt_token_ids
    return np.array([e[t].logprob for t, e in zip(tokens, output.prompt_logprobs, strict=True) if e])


@pytest.mark.parametrize("driver", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_says_what_its_rounded_weights_say(native: Any, driver: str, dtype: str) -> None:
    """As the reference driver in float64, but for the rounding of rows; nearer to it than the plain weights are."""
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    expected = answers(TEXTS, dtype="float64", **ROUNDED[driver])
    found = answers(TEXTS, dtype=dtype, quantization=driver)
    plain = answers(TEXTS, dtype="float64")
    away, lost = [], []
    for output, reference, unrounded in zip(found, expected, plain, strict=True):
        away.append(np.abs(scores(output) - scores(reference)).mean())
        lost.append(np.abs(scores(unrounded) - scores(reference)).mean())
        if dtype == "bfloat16":  # whose own rounding moves logits of 25 by more than what decides some tokens
            continue
        best, other = output.outputs[0], reference.outputs[0]
        for token, right, entry in zip(best.token_ids, other.token_ids, other.logprobs, strict=True):
            first, second = sorted((e.logprob for e in entry.values()), reverse=True)[:2]
            if first - second < 0.5:
                break
            assert token == right
    assert np.mean(away) < 0.1  # of log probabilities down to -25
    if driver == "int4":
        assert np.mean(away) < np.mean(lost)


@pytest.mark.parametrize("driver", ["int8", "int4"])
def test_two_ranks(native: Any, driver: str) -> None:
    """Each rounds its own part: near what one rank gives."""
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    one = answers(TEXTS, dtype="float32", quantization=driver)
    two = answers(TEXTS, dtype="float32", quantization=driver, tensor_parallel_size=2)
    for output, other in zip(two, one, strict=True):
        assert np.abs(scores(output) - scores(other)).mean() < 0.3


@pytest.mark.parametrize("driver", ["int8", "int4"])
def test_what_it_does_not_serve_is_refused(native: Any, driver: str) -> None:
    with pytest.raises(UnfitDriverError, match=rf"'{driver}'.*dtype float64 is not one of float32, bfloat16"):
        LLM(dtype="float64", quantization=driver)


MEASURE = """
import sys
from pathlib import Path
from engine import LLM

def peak(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

sizes = {"num_kv_pages": 8, "max_model_len": 64, "max_num_seqs": 4}
settings = {"dtype": "bfloat16", "quantization": sys.argv[2], **sizes}
with LLM(model="dummy:tiny", **settings):
    pass  # everything is imported
Path("/proc/self/clear_refs").write_text("5")
before = peak("VmRSS:")
with LLM(model=sys.argv[1], **settings) as llm:
    print(peak("VmHWM:") - before, llm.llm_engine.client.worker.weight_bytes)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a file for each layer: of files, one at a time is mapped."""
    folder = tmp_path_factory.mktemp("sharded")
    config = config_of("dummy:0.6B,layers=8,vocab=512")
    tensors = {name: torch.rand(shape).sub_(0.5).mul_(0.1).bfloat16() for name, shape in shapes_of(config).items()}
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = tensor
    for key, shard in shards.items():
        save_file(shard, folder / f"model-{key}.safetensors")
    index = {name: f"model-{key}.safetensors" for key, shard in shards.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    for file in Path(str(files("engine_reference.checkpoint_dummy") / "files")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["int8", "int4"])
def test_a_load_never_holds_the_plain_weights(native: Any, sharded: Path, driver: str) -> None:
    """Its peak is what remains, the file that is read, one plain layer, and little more."""
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")
    command = [sys.executable, "-c", MEASURE, str(sharded), driver]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "PermissionError" in done.stderr:
        pytest.skip("the kernel does not let a process forget its peak")
    assert done.returncode == 0, done.stderr
    peak, packed = map(int, done.stdout.split()[-2:])
    layer, gate_up = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072, 2 * 1024 * 3072
    assert packed < 8 * layer * {"int8": 1.02, "int4": 0.6}[driver]
    assert peak < packed + 2 * layer + 2 * gate_up + (32 << 20)
