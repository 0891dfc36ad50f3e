"""The engine with latent attention by one driver or another."""

from __future__ import annotations

from engine import LLM, SamplingParams

PROMPTS = [list(range(3, 3 + length)) for length in (40, 1, 7)]


def greedy(model: str, attention: str) -> list[list[int]]:
    """The greedy tokens of a few prompts, computed in float32 and in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(
        model=model, attention=attention, dtype="float32", max_model_len=64, max_num_seqs=4, block_size=4,
        max_num_batched_tokens=24, num_kv_pages=60,
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
