"""What strangers wrote out of tree, right ones: they pass the suite by a few lines, and serve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from engine_gpt2.card import GPT2Card
from engine_mixtral.card import MixtralCard
from engine_times3.body import Times3
from engine_times3.card import Times3Card
from plain_stored import STORED, Times3Suite, thirds
from registered import register
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from engine import LLM, SamplingParams
from engine.cli.main import main
from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine_sdk.conformance import ModelConformance, QuantizationConformance
from engine_sdk.conformance.model.ranks import on_ranks
from engine_sdk.conformance.model.small import small_config

STRANGERS = Path(__file__).parent / "strangers"


class TestGPT2(ModelConformance):
    card, architecture = GPT2Card, "GPT2LMHeadModel"


class TestMixtral(ModelConformance):
    card, architecture = MixtralCard, "MixtralForCausalLM"


class TestTimes3(Times3Suite, QuantizationConformance):
    card = Times3Card


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All packages, as `pip install -e` leaves them."""
    for folder in STRANGERS.iterdir():
        register(folder, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return


def checkpoint(folder: Path, architecture: str) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder of a random model, as transformers saves it, and that model."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    config = {**small_config(architecture, {}), "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.2}
    model = kind(kind.config_class(**config)).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(99)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_they_serve(installed: None, tmp_path: Path, architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that transformers saved: the greedy tokens are transformers' own. Whether steps are captured is the
    card's word: it is kept, and told."""
    folder, model = checkpoint(tmp_path / "model", architecture)
    prompts = [[5, 17, 40, 8], [60], [9, 9, 12, 80, 33, 71, 4]]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :] for ids in prompts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model=str(folder), dtype="float32", num_kv_pages=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        worker = llm.llm_engine.client.worker
    assert [list(output.outputs[0].token_ids) for output in outputs] == [ids.tolist() for ids in expected]
    assert main(["plugins", "why", "model", "--model", str(folder)]) == 0
    said = capsys.readouterr().out
    assert architecture in said
    uncaptured = architecture == "MixtralForCausalLM"
    assert ("captured_by = frozenset()" in said) == uncaptured
    if worker.not_captured is not None:  # the platform captures steps
        assert any("captured_by = frozenset()" in reason for reason in worker.not_captured) == uncaptured
        assert not (uncaptured and worker.captured)


Tensors = dict[str, torch.Tensor]


def stored(tensors: Tensors, plain: Sequence[str]) -> tuple[Tensors, Tensors]:
    """(a checkpoint's tensors as times3 stores them, but for what it leaves plain; the plain ones that they mean)."""
    written: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        meant[name] = written[name] = tensor.double()
        if kind == "weight" and (layer.endswith("_proj") or layer == "lm_head") and layer not in plain:
            del written[name]
            scale = 20 / tensor.abs().max()  # the codes are few, whatever the weights are
            written[f"{layer}.third"], meant[name] = thirds(scale * tensor)
    return written, meant


def test_stored_weights_are_served(installed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose config names the form gives the tokens of the plain one that it means: nobody names the
    driver."""
    folder, _ = checkpoint(tmp_path / "model", "LlamaForCausalLM")
    written, meant = stored(load_file(folder / "model.safetensors"), plain=STORED["ignore"])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for tensors, more in ((meant, {}), (written, {"quantization_config": STORED})):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | more))
        with LLM(model=str(folder), dtype="float64", num_kv_pages=64) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in ([5, 17, 40, 8], [60])]
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
            elements = llm.llm_engine.client.worker.num_parameters
    assert found[0] == found[1]
    assert elements == sum(tensor.numel() for tensor in meant.values())
    assert main(["plugins", "why", "quantization", "--model", str(folder)]) == 0
    assert "times3" in capsys.readouterr().out


def test_a_draft_model_with_stored_weights_is_served(installed: None, tmp_path: Path) -> None:
    """One whose weights mean the target's, which are plain: all of its drafts are kept, and the tokens are those
    without it."""
    pytest.importorskip("engine_drafters", reason="engine-drafters is not installed")
    target, draft = (checkpoint(tmp_path / name, "LlamaForCausalLM")[0] for name in ("target", "draft"))
    written, meant = stored(load_file(draft / "model.safetensors"), plain=STORED["ignore"])
    save_file(meant, target / "model.safetensors", metadata={"format": "pt"})
    save_file(written, draft / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    found = []
    for more in ({}, {"drafter": "draft_model", "drafter.model": str(draft), "drafter.adaptive": False}):
        settings = {"dtype": "float64", "num_kv_pages": 64, **more}
        with LLM(model=str(target), **settings) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in ([5, 17, 40, 8], [60])]
            found.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
            stats = llm.llm_engine.stats()
    (given,) = launch(EngineConfig(model=str(target), **settings)).start.worker.drafts
    assert {choice.driver for choice in given.choices if choice.point == "quantization"} == {"times3"}
    assert found[0] == found[1]
    assert stats.num_accepted_drafts == stats.num_drafts > 10


class _Llama(ModelConformance):
    driver = "LlamaForCausalLM"


@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_weights_are_divided(ranks: int) -> None:
    """Ranks read their parts of what is stored, and sum what they mean, in float64."""
    written, meant = stored(dict(_Llama.weights()), plain=["lm_head"])
    ids = _Llama.ids(7)
    body = {"linear": Times3(None)}  # type: ignore[arg-type]
    found = on_ranks(
        ranks,
        lambda group: _Llama.session(
            weights=list(written.items()),
            group=group if ranks > 1 else None,
            quantization=body,
        ).whole(ids),
    )
    expected = _Llama.session(weights=list(meant.items())).whole(ids)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)
