"""Rotary tables against transformers' own frequencies, for every kind of scaling and both forms of config.json."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ROPES
from plain import PlainOps, make_context

from engine.types.errors import CheckpointError, ConfigError, EngineError, UnsupportedModelError
from engine_kit import rotary_table
from engine_kit.model_config import read_rope, scaled_length, unsupported_rope
from engine_kit.rotary import cos_sin_table, inverse_frequencies, make_rotary
from engine_reference.models.llama_card import Llama

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = ROPES["llama3"] | {"original_max_position_embeddings": 512}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear-int": {"rope_type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.7},
    "yarn": YARN,
    "yarn-no-truncation": YARN | {"truncate": False},
    "yarn-betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn-zero-betas": YARN | {"beta_fast": 0, "beta_slow": 0},
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn-mscale-alone": YARN | {"mscale": 0.707},
    "yarn-equal-bounds": YARN | {"beta_fast": 1000, "beta_slow": 500, "original_max_position_embeddings": 8},
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-close": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 1.5},
}


def base_config(head_dim: int = 64, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """config.json without rotary parameters."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        **copy.deepcopy(more),  # transformers writes into what it is given
    }


def forms(parameters: dict[str, Any], theta: float, **more: Any) -> list[dict[str, Any]]:
    """config.json with these rotary parameters as transformers 5, late 4 and early 4 wrote them."""
    early = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    plain = parameters == {"rope_type": "default"}
    return [
        base_config(rope_parameters={"rope_theta": theta, **parameters}, **more),
        base_config(rope_theta=theta, rope_scaling=None if plain else parameters, **more),
        base_config(rope_theta=theta, rope_scaling=None if plain else early, **more),
    ]


def oracle(config: dict[str, Any]) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(LlamaConfig.from_dict({k: v for k, v in config.items() if k != "architectures"}))


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tables_equal_transformers(variant: str, head_dim: int, theta: float) -> None:
    """Frequencies bit by bit, cosines and sines as they go into a float32 model."""
    for config in forms(VARIANTS[variant], theta, head_dim=head_dim):
        theirs = oracle(config)
        rope = read_rope(config, head_dim)
        frequencies, factor = inverse_frequencies(rope)
        assert torch.equal(frequencies, theirs.inv_freq)
        assert factor == theirs.attention_scaling
        cos, sin = theirs(torch.zeros(1), torch.arange(2048)[None])
        table = cos_sin_table(rope, 2048)
        assert table.dtype == torch.float32
        half = head_dim // 2
        torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
        torch.testing.assert_close(table[:, half:], sin[0, :, half:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [None, 8.0])
def test_longrope(factor: float | None) -> None:
    """transformers' frequencies of short requests and of long ones; which count is decided by what is served."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1 + i / 20 for i in range(16)],
        "long_factor": [1 + i * 1.5 for i in range(16)],
        **({} if factor is None else {"factor": factor}),
    }
    config = base_config(32, rope_parameters=parameters, original_max_position_embeddings=512)
    theirs = Phi3Config.from_dict({k: v for k, v in config.items() if k != "architectures"} | {"pad_token_id": None})
    rope = read_rope(config, 32)
    for length in (512, 513):
        expected, scale = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=length)
        found, our_scale = inverse_frequencies(rope, length=length)
        assert torch.equal(found, expected) and our_scale == scale
        assert cos_sin_table(rope, length)[0, 0] == pytest.approx(scale)
        by_numpy, numpys_scale = rotary_table.inverse_frequencies(np, rope, length, np.float64)
        np.testing.assert_allclose(by_numpy, expected.double().numpy(), rtol=1e-6)
        assert numpys_scale == scale
    with pytest.raises(CheckpointError, match="long_factor.*16 positive numbers"):
        read_rope({**config, "rope_parameters": {**parameters, "long_factor": [1.0] * 15}}, 32)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "default"])
def test_partial_rotary(variant: str) -> None:
    """A quarter of a head of 64: transformers' functions with the same factor."""
    config = base_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25, **VARIANTS[variant]})
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    their_config = LlamaConfig.from_dict({k: v for k, v in config.items() if k != "architectures"})
    theirs, factor = ROPE_INIT_FUNCTIONS[VARIANTS[variant]["rope_type"]](their_config)
    ours, our_factor = inverse_frequencies(read_rope(config, 64))
    assert ours.shape == (8,) and torch.equal(ours, theirs) and factor == our_factor
    legacy = base_config(rope_theta=1e4, partial_rotary_factor=0.25, rope_scaling=VARIANTS[variant])
    assert read_rope(legacy, 64) == read_rope(config, 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(variant: str) -> None:
    """The float64 table is computed in float64: where float32's frequencies are refined, not replaced."""
    rope = read_rope(base_config(rope_scaling=VARIANTS[variant]), 64)
    wide, factor = inverse_frequencies(rope, torch.float64)
    narrow, _ = inverse_frequencies(rope)
    assert wide.dtype == torch.float64
    assert torch.equal(wide.float(), narrow) is False or variant != "default"
    torch.testing.assert_close(wide.float(), narrow, rtol=1e-5, atol=1e-9)
    table = cos_sin_table(rope, 100, torch.float64)
    expected = [math.cos(99 * w) * factor for w in wide.tolist()] + [math.sin(99 * w) * factor for w in wide.tolist()]
    torch.testing.assert_close(table[99], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-13)
    by_numpy = rotary_table.cos_sin_table(np, rope, 100, np.float64)
    assert by_numpy.dtype == np.float64
    np.testing.assert_allclose(by_numpy, table.numpy(), rtol=0, atol=1e-13)


def test_rotation_equals_transformers() -> None:
    """Through ops, on queries and keys with different head counts."""
    config = base_config(rope_scaling=YARN)
    context = make_context(Llama.describe(config))
    q, k, positions = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.tensor([0, 7, 3, 2047, 1])
    cos, sin = oracle(config)(q, positions[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    for ours, theirs in zip(make_rotary(context, read_rope(config, 64))(q, k, positions), expected, strict=True):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-5)


def test_partial_rotation_leaves_the_rest() -> None:
    """Elements past rotary_dim go through unchanged."""
    q = torch.randn(2, 3, 8)
    table = cos_sin_table(read_rope(base_config(rope_scaling={"rope_type": "linear", "factor": 2}, head_dim=4), 4), 9)
    rotated, _ = PlainOps().rope(q, q, torch.tensor([5, 6]), table)
    assert torch.equal(rotated[..., 4:], q[..., 4:]) and not torch.equal(rotated[..., :4], q[..., :4])


def test_dynamic_only_up_to_the_original_length() -> None:
    """At the original length it equals no scaling; one position more is refused."""
    description = Llama.describe(base_config(rope_scaling=VARIANTS["dynamic"]))
    assert description.max_model_len == 2048
    rope = read_rope(description.config, 64)
    plain = cos_sin_table(read_rope(base_config(), 64), 2048)
    torch.testing.assert_close(make_rotary(make_context(description), rope).cos_sin, plain, rtol=0, atol=1e-3)
    with pytest.raises(ConfigError, match=r"max_model_len=2049 .*dynamic.*2048"):
        make_rotary(make_context(description, max_model_len=2049), rope)


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        (VARIANTS["default"], 2048),
        (VARIANTS["linear"], 6144),
        (YARN, 2048),
        (YARN | {"factor": 8.0}, 4096),
        (VARIANTS["yarn-no-original"], 4096),
        (LLAMA3, 2048),
    ],
)
def test_length(parameters: dict[str, Any], length: int) -> None:
    """The scaled length is the model's."""
    assert scaled_length(read_rope(base_config(rope_scaling=parameters), 64)) == length


def test_original_length_beside_the_parameters() -> None:
    """A number outside the rotary parameters goes first, as in transformers."""
    config = base_config(rope_scaling=YARN, original_max_position_embeddings=256)
    assert read_rope(config, 64).original_max_position == 256
    assert torch.equal(inverse_frequencies(read_rope(config, 64))[0], oracle(config).inv_freq)


@pytest.mark.parametrize(
    ("parameters", "error", "words"),
    [
        ({"rope_type": "longrope"}, CheckpointError, "short_factor"),
        ({"rope_type": "proportional"}, UnsupportedModelError, "proportional"),
        ({"type": "mrope"}, UnsupportedModelError, "mrope"),
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, UnsupportedModelError, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, UnsupportedModelError, "layer type"),
        ({"rope_type": "linear"}, CheckpointError, "'factor'.*missing"),
        ({"rope_type": "linear", "factor": 0}, CheckpointError, "'factor'.*0"),
        ({"rope_type": "linear", "factor": "2"}, CheckpointError, "'factor'.*'2'"),
        ({"rope_type": "llama3", "factor": 8.0}, CheckpointError, "low_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, CheckpointError, "low_freq_factor = 4.0"),
        ({"rope_theta": True}, CheckpointError, "rope_theta"),
        ({"partial_rotary_factor": 0.3}, CheckpointError, "19 of 64"),
        ("linear", CheckpointError, "not an object"),
    ],
)
def test_bad_parameters(parameters: Any, error: type[EngineError], words: str) -> None:
    """Each is named."""
    with pytest.raises(error, match=words):
        read_rope(base_config(rope_parameters=parameters), 64)


def test_known_types_are_supported() -> None:
    for parameters in VARIANTS.values():
        assert unsupported_rope(base_config(rope_scaling=parameters)) == []


def test_attention_factor_without_stretch() -> None:
    """A factor of 1 changes nothing."""
    rope = read_rope(base_config(rope_scaling=YARN | {"factor": 1.0}), 64)
    assert rotary_table.yarn_attention_factor(rope) == 1.0
