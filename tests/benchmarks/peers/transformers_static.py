"""Hugging Face transformers: `generate` on static batches, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import Settings, serve

BATCH = 16

PEER = Peer(
    name="transformers",
    module="tests.benchmarks.peers.transformers_static",
    weights=("bf16",),
    steps=(("install", "torch==2.13.0"), ("install", "transformers==5.23.0", "accelerate==1.15.0")),
    about=f"`generate` on batches of {BATCH} requests of similar output lengths, attention `sdpa`",
)


class TransformersStatic:
    """A worker."""

    def prepare(self, settings: Settings) -> None:
        """Nothing: it reads the checkpoint as it is."""

    def load(self, settings: Settings) -> Sequence[str]:
        """Start."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        self._model = AutoModelForCausalLM.from_pretrained(
            settings.checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        # A random model may choose the end of sequence, and that would end a request.
        self._model.generation_config.eos_token_id = None
        return ("transformers", "torch")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete, batch by batch: requests whose outputs are of similar length stand together, so that few tokens are
        made for nothing."""
        outputs: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: output_lens[i])
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            made = self._batch([prompts[i] for i in places], max(output_lens[i] for i in places))
            for i, tokens in zip(places, made, strict=True):
                outputs[i] = tokens[: output_lens[i]]
        return outputs

    def _batch(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=output_len, do_sample=False, pad_token_id=0
            )
        found: list[list[int]] = made[:, longest:].tolist()
        return found


if __name__ == "__main__":
    serve(TransformersStatic())
