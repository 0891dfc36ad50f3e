"""The texts to train on: prompts of the bundled model's corpus with the answers that the model itself writes.

A draft is accepted where it equals what the target says, right or wrong, so the target's own greedy answers are learnt
and not the corpus'.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from engine_tiny import model_folder
from engine_tiny.corpus import chat
from engine_tiny.corpus.base import Split
from engine_tiny.generation import EngineBackend
from engine_tiny.layout import EOS, IM_END, TOKEN_IDS
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import load_tokenizer

SEED = 20261123
MAX_PROMPT = 640
MAX_ANSWER = 256
STORY_START = 12
"""So many tokens of a story are the prompt that the target goes on from."""


@dataclass(frozen=True)
class Text:
    """One text.

    Args:
        tokens: int64 [T].
        spoken: bool [T]; the tokens that the target speaks (its own answer, and the turns before it): the ones that are
            drafted when the text is served.
    """

    tokens: np.ndarray
    spoken: np.ndarray


def prompts(split: Split, seed: int = SEED) -> Iterator[tuple[list[int], np.ndarray, bool]]:
    """Endless: the ids of a prompt, which of them were spoken by the assistant, and whether a turn is to follow."""
    encoder = Encoder(load_tokenizer(model_folder()))
    sources = [chat.documents(seed, split, mix=mix) for mix in ("general", "copying")]
    while True:
        for source in sources:
            document = next(source)
            ids, spoken = encoder.document(document)
            end = STORY_START if document.text else encoder.assistant_spans(ids)[-1][0]
            if end <= MAX_PROMPT:
                yield ids[:end], spoken[:end], not document.text


def write_texts(path: Path, split: Split, count: int, part: int = 1000) -> None:
    """Have the engine answer `count` prompts, and keep the texts in `path` (.safetensors), which grows by the part."""
    backend = EngineBackend("tiny")
    source = prompts(split)
    texts: list[Text] = []
    while len(texts) < count:
        asked = list(islice(source, min(part, count - len(texts))))
        answers = backend.generate([ids for ids, _, _ in asked], MAX_ANSWER)
        for (ids, spoken, turn), answer in zip(asked, answers, strict=True):
            whole = [*ids, *answer]
            if len(answer) < MAX_ANSWER:
                whole.append(TOKEN_IDS[IM_END if turn else EOS])
            texts.append(Text(np.array(whole), np.concatenate([spoken, np.ones(len(whole) - len(ids), dtype=bool)])))
        save_texts(path, texts)
        print(f"{len(texts)} texts, {sum(int(text.spoken.sum()) for text in texts)} tokens spoken", flush=True)


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """One after the other, in three arrays."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]).astype(np.uint16),
        "spoken": np.concatenate([text.spoken for text in texts]),
        "ends": np.cumsum([len(text.tokens) for text in texts]),
    }
    save_file(arrays, unfinished)
    unfinished.replace(path)


def read_texts(path: Path) -> list[Text]:
    """What `save_texts` has written."""
    arrays = load_file(path)
    tokens, spoken, ends = arrays["tokens"].astype(np.int64), arrays["spoken"], arrays["ends"]
    return [Text(tokens[a:b], spoken[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
