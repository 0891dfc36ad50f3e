"""Who generates for the evaluation: the engine (the product), or transformers (to compare with)."""

from pathlib import Path
from typing import Any, Protocol

from engine_tiny.layout import EOS, IM_END, TOKEN_IDS

STOPS = (TOKEN_IDS[IM_END], TOKEN_IDS[EOS])


class Backend(Protocol):
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations, in the order of the prompts, without the token that ended them."""
        ...


class EngineBackend:
    def __init__(self, model: str) -> None:
        from engine import LLM

        self._llm: Any = LLM(model=model)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        from engine import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [_until_stop(output.outputs[0].token_ids) for output in outputs]


class TransformersBackend:
    def __init__(self, folder: Path, rows: int = 32) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._rows = rows
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """By length, padded on the left: prompts of a like length share a batch."""
        torch = self._torch
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[list[int]] = [[] for _ in prompts]
        for at in range(0, len(order), self._rows):
            part = order[at : at + self._rows]
            width = max(len(prompts[i]) for i in part)
            ids = torch.full((len(part), width), TOKEN_IDS[EOS])
            mask = torch.zeros((len(part), width), dtype=torch.long)
            for row, i in enumerate(part):
                ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            with torch.inference_mode():
                made = self._model.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False,
                    eos_token_id=list(STOPS), pad_token_id=TOKEN_IDS[EOS],
                )  # fmt: skip
            for row, i in enumerate(part):
                results[i] = _until_stop(made[row, width:].tolist())
        return results


def _until_stop(ids: list[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in STOPS:
            return list(ids[:place])
    return list(ids)
