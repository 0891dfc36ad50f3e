"""The byte-level BPE, trained on the corpus.

Two choices serve copying and counting. Digits stand alone, so that sums can be learnt digit by digit.
A word with a capital never swallows the space before it, so that a name has the same tokens in a sentence
and between the quotes of JSON, and can be copied token by token.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine_tiny.corpus import chat
from engine_tiny.layout import BOS, CONTROL_TOKENS, MARKUP_TOKENS, SPECIAL_TOKENS, TOKEN_IDS
from engine_tiny.render import document_text

VOCAB_SIZE = 4096
PATTERN = (
    r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})"
    r"| ?\p{Ll}+"
    r"|\p{Lu}\p{Ll}*"
    r"|\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+"
)


def train_tokenizer(seed: int, documents: int = 24_000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document_text(doc) for doc in itertools.islice(chat.documents(seed, "train"), documents))
    tokenizer.train_from_iterator(_without_markup(texts), trainer)
    # The trainer marks all of them special; those of the tool calls must stay visible when text is decoded.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, TOKEN_IDS[BOS])]
    )
    return tokenizer


def _without_markup(texts: Iterable[str]) -> Iterator[str]:
    """No merge may grow across a special token."""
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n\n")
        yield from (part for part in text.split("\n\n") if part)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
