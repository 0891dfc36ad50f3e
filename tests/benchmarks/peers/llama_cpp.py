"""llama.cpp through the C interface that llama-cpp-python binds, built here for this processor.

Its own Python class serves one request after the other, so the batches are made here as its server makes them: a slot a
request, the slots' next tokens and waiting prompts in one batch. A prefix that all prompts of a call share is computed
once and copied to the slots, as its batched example does. With a draft model one request after the other is served, as
its example `speculative-simple` goes. Tokens are chosen by numpy's argmax on the logits.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import DRAFTS, GGUF, Settings, serve

SLOTS = 16
"""Requests that run at once. Each has a cache for the longest context: 64 of them would take 15 GB at 0.6B."""
BATCH_TOKENS = 2048
"""llama.cpp's own default."""
LEAST_PREFIX = 64

PEER = Peer(
    name="llama.cpp",
    module="tests.benchmarks.peers.llama_cpp",
    weights=("bf16", "int8", "int4", *GGUF, "draft"),
    steps=(
        ("install", "gguf==0.19.0"),
        ("install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),
    ),
    install_environment={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF",
        "CMAKE_BUILD_PARALLEL_LEVEL": "{jobs}",
    },
    about=f"its C interface, {SLOTS} slots batched as its server does, Q8_0 and Q4_0 for int8 and int4; "
    "with a draft model as its example `speculative-simple` goes",
)


@dataclass
class Slot:
    """A request at work.

    Args:
        sequence: the cache's sequence, and the slot's number.
        pending: tokens still to be computed, the next first.
        position: of the next token.
    """

    place: int
    sequence: int
    pending: deque[int]
    position: int
    output_len: int
    made: list[int] = field(default_factory=list)
    row: int = -1


class Text:
    """One text in a context of its own.

    Args:
        length: tokens that are computed.
    """

    def __init__(self, api: Any, context: Any, vocab_size: int) -> None:
        self.length = 0
        self._api = api
        self._context = context
        self._memory = api.llama_get_memory(context)
        self._vocab_size = vocab_size
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def cut(self, length: int) -> None:
        """Forget what lies behind so many tokens."""
        self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = min(self.length, length)

    def compute(self, tokens: Sequence[int], count: int) -> list[int]:
        """Go on with these, and tell the likeliest token behind each of the last `count`."""
        import numpy as np

        batch, n = self._batch, len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, self.length + i, 1, i >= n - count
            batch.seq_id[i][0] = 0
        batch.n_tokens = n
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        self.length += n
        rows = (self._api.llama_get_logits_ith(self._context, i) for i in range(n - count, n))
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in rows]


def speculate(target: Any, draft: Any, prompt: list[int], output_len: int) -> list[int]:
    """One request: the draft model goes on greedily, the target computes its last token and the drafts in one batch,
    and they are kept up to the first that is another than the target's."""
    target.cut(0)
    draft.cut(0)
    text = [*prompt, *target.compute(prompt, 1)]
    draft.compute(prompt, 1)
    end = len(prompt) + output_len
    while len(text) < end:
        drafts: list[int] = []
        for _ in range(min(DRAFTS, end - len(text) - 1)):
            drafts += draft.compute([*text, *drafts][draft.length :], 1)
        checked = target.compute([text[-1], *drafts], 1 + len(drafts))
        kept = next(
            (i for i, (one, other) in enumerate(zip(drafts, checked, strict=False)) if one != other), len(drafts)
        )
        text += checked[: kept + 1]
        target.cut(len(text) - 1)
        draft.cut(len(text) - 1)
    return text[len(prompt) :]


class LlamaCpp:
    """A worker."""

    def prepare(self, settings: Settings) -> None:
        """Write GGUF in bf16, then let llama.cpp quantize it where asked for."""
        path = self._path(settings)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        if settings.weights in ("bf16", "draft"):
            from tests.benchmarks.peers.gguf_file import write_gguf

            if settings.weights == "draft":
                write_gguf(settings.draft_folder, path.with_name("draft.gguf"))
            write_gguf(Path(settings.checkpoint), temporary)
        else:
            self._quantize(settings, temporary)
        os.replace(temporary, path)

    def _quantize(self, settings: Settings, target: Path) -> None:
        import llama_cpp as api  # type: ignore[import-not-found, unused-ignore]

        from tests.benchmarks.peers.gguf_file import write_gguf

        whole = target.with_suffix(".bf16")
        write_gguf(Path(settings.checkpoint), whole)
        parameters = api.llama_model_quantize_default_params()
        types = {
            "int8": api.LLAMA_FTYPE_MOSTLY_Q8_0,
            "q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0,
            "int4": api.LLAMA_FTYPE_MOSTLY_Q4_0,
            "q4_k_m": api.LLAMA_FTYPE_MOSTLY_Q4_K_M,
        }
        parameters.ftype = types[settings.weights]
        parameters.nthread = settings.threads
        status = api.llama_model_quantize(str(whole).encode(), str(target).encode(), ctypes.byref(parameters))
        whole.unlink()
        if status:
            raise RuntimeError(f"llama_model_quantize: status {status}")

    def _path(self, settings: Settings) -> Path:
        return settings.converted_folder / "model.gguf"

    def load(self, settings: Settings) -> Sequence[str]:
        """Start."""
        import llama_cpp as api
        import numpy as np

        self._api = api
        self._np = np
        api.llama_backend_init()
        self._settings = settings
        self._texts: tuple[Text, ...] = ()
        if settings.weights == "draft":
            names = ("model.gguf", "draft.gguf")
            self._texts = tuple(Text(api, *self._open(settings.converted_folder / name, 1)) for name in names)
            return ("llama-cpp-python", "gguf")
        slots = min(SLOTS, settings.max_num_seqs)
        self._context, self._vocab_size = self._open(self._path(settings), slots)
        self._slots = slots
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)
        return ("llama-cpp-python", "gguf")

    def _open(self, path: Path, sequences: int) -> tuple[Any, int]:
        """(a context of the file's model, its vocabulary's size)."""
        api, settings = self._api, self._settings
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp did not load {path}")
        parameters = api.llama_context_default_params()
        parameters.n_seq_max = sequences
        parameters.n_ctx = sequences * settings.max_model_len
        parameters.n_batch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = settings.threads
        parameters.kv_unified = False
        parameters.no_perf = True
        context = api.llama_init_from_model(model, parameters)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        return context, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete."""
        if self._texts:
            target, draft = self._texts
            return [speculate(target, draft, *asked) for asked in zip(prompts, output_lens, strict=True)]
        self._api.llama_memory_clear(self._memory, False)
        waiting = deque(enumerate(zip(prompts, output_lens, strict=True)))
        free, running = list(range(self._slots - 1, -1, -1)), dict[int, Slot]()
        outputs: list[list[int]] = [[] for _ in prompts]
        shared = self._share_prefix(prompts)
        while waiting or running:
            while waiting and free:
                place, (prompt, output_len) = waiting.popleft()
                sequence = free.pop()
                running[sequence] = Slot(place, sequence, deque(prompt[shared:]), shared, output_len)
            self._step(list(running.values()))
            for slot in [slot for slot in running.values() if len(slot.made) == slot.output_len]:
                outputs[slot.place] = slot.made
                self._api.llama_memory_seq_rm(self._memory, slot.sequence, shared, -1)
                del running[slot.sequence]
                free.append(slot.sequence)
        return outputs

    def _share_prefix(self, prompts: list[list[int]]) -> int:
        """Compute what all prompts begin with in slot 0, and copy it to the others, which keep it between requests.
        Returns its tokens, 0 where it is short."""
        if len(prompts) < 2:
            return 0
        columns = enumerate(zip(*prompts, strict=False))
        shared = next((i for i, column in columns if len(set(column)) > 1), min(map(len, prompts)) - 1)
        if shared < LEAST_PREFIX:
            return 0
        for start in range(0, shared, BATCH_TOKENS):
            self._batch.n_tokens = 0
            for position in range(start, min(start + BATCH_TOKENS, shared)):
                self._add(prompts[0][position], position, 0, wants_logits=False)
            self._decode()
        for sequence in range(1, min(self._slots, len(prompts))):
            self._api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        return shared

    def _step(self, slots: list[Slot]) -> None:
        """One batch: decoding slots first, then prompts as far as there is room."""
        self._batch.n_tokens = 0
        ready = []
        for slot in sorted(slots, key=lambda slot: len(slot.pending)):
            while slot.pending and self._batch.n_tokens < BATCH_TOKENS:
                token = slot.pending.popleft()
                self._add(token, slot.position, slot.sequence, wants_logits=not slot.pending)
                slot.position += 1
            if not slot.pending:
                slot.row = self._batch.n_tokens - 1
                ready.append(slot)
            if self._batch.n_tokens == BATCH_TOKENS:
                break
        self._decode()
        for slot in ready:
            logits = self._api.llama_get_logits_ith(self._context, slot.row)
            token = int(self._np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
            slot.made.append(token)
            slot.pending.append(token)

    def _add(self, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants_logits
        batch.seq_id[i][0] = sequence
        batch.n_tokens = i + 1

    def _decode(self) -> None:
        status: Any = self._api.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")


if __name__ == "__main__":
    serve(LlamaCpp())
