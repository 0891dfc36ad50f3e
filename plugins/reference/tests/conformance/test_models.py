"""The reference models through the suites of engine-sdk: each architecture plainly, and their features."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import EncoderModelConformance, ModelConformance

BIASES = {"attention_bias": True, "mlp_bias": True}
MIXED = {
    "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    "num_key_value_heads": 4, "head_dim": 12,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4, "first_k_dense_replace": 2,
}  # fmt: skip
LATENT_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
LATENT_V3 = {"rope_parameters": LATENT_YARN, "num_nextn_predict_layers": 0}  # no layers that nobody uses
ONE_TYPE = {"type_vocab_size": 1, "pad_token_id": 1}
NO_CARD = r"^(?!test_card_is_light)"
"""Of those whose cards stand in one module with another's, which is imported for it."""


class TestLlama(ModelConformance):
    driver, config = "LlamaForCausalLM", BIASES


class TestMistral(ModelConformance):
    driver, config = "MistralForCausalLM", {"sliding_window": 7}
    quick = NO_CARD


class TestQwen2(ModelConformance):
    driver, config = "Qwen2ForCausalLM", {"tie_word_embeddings": True}
    quick = NO_CARD


class TestQwen3(ModelConformance):
    driver, config = "Qwen3ForCausalLM", MIXED
    quick = NO_CARD


class TestLlamaEmbedder(ModelConformance):
    driver = "LlamaModel"
    quick = NO_CARD


class TestQwen3Classifier(ModelConformance):
    driver = "Qwen3ForSequenceClassification"
    quick = NO_CARD


class TestDeepseekV3(ModelConformance):
    driver, config = "DeepseekV3ForCausalLM", {**LATENT, **LATENT_V3, "attention_bias": True}


class TestBert(EncoderModelConformance):
    driver = "BertModel"


class TestRobertaClassifier(EncoderModelConformance):
    driver, config = "RobertaForSequenceClassification", ONE_TYPE
    quick = NO_CARD


class TestQwen2ProcessReward(ModelConformance):
    driver, oracle = "Qwen2ForProcessRewardModel", None
    quick = NO_CARD


@pytest.mark.slow
class TestQwen2Reward(ModelConformance):
    driver, oracle = "Qwen2ForRewardModel", None


@pytest.mark.slow
class TestPlainLlama(ModelConformance):
    driver, config = "LlamaForCausalLM", {"num_key_value_heads": 1}


@pytest.mark.slow
class TestDeepseekV2(ModelConformance):
    driver, config = "DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None, "tie_word_embeddings": True}


@pytest.mark.slow
class TestYarn(ModelConformance):
    driver, config = "LlamaForCausalLM", {"rope_parameters": YARN}


@pytest.mark.slow
class TestDeepMistral(ModelConformance):
    driver, config = "MistralForCausalLM", {"num_hidden_layers": 4, "sliding_window": None}


@pytest.mark.slow
class TestQwen3WithBiases(ModelConformance):
    driver, config = "Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}


@pytest.mark.slow
class TestMistralEmbedder(ModelConformance):
    driver, config = "MistralModel", {"sliding_window": 7}


@pytest.mark.slow
class TestQwen2Embedder(ModelConformance):
    driver = "Qwen2Model"


@pytest.mark.slow
class TestQwen3Embedder(ModelConformance):
    driver = "Qwen3Model"


@pytest.mark.slow
class TestLlamaClassifier(ModelConformance):
    driver = "LlamaForSequenceClassification"


@pytest.mark.slow
class TestMistralClassifier(ModelConformance):
    driver, config = "MistralForSequenceClassification", {"num_labels": 1}


@pytest.mark.slow
class TestQwen2Classifier(ModelConformance):
    driver = "Qwen2ForSequenceClassification"


@pytest.mark.slow
class TestBertClassifier(EncoderModelConformance):
    driver, config = "BertForSequenceClassification", {"hidden_act": "gelu_new"}


@pytest.mark.slow
class TestRoberta(EncoderModelConformance):
    driver, config = "RobertaModel", ONE_TYPE


@pytest.mark.slow
class TestXLMRoberta(EncoderModelConformance):
    driver, config = "XLMRobertaModel", ONE_TYPE


@pytest.mark.slow
class TestXLMRobertaClassifier(EncoderModelConformance):
    driver, config = "XLMRobertaForSequenceClassification", {**ONE_TYPE, "num_labels": 1}
