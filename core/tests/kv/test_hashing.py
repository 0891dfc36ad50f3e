"""Names of prefixes."""

import hashlib

import numpy as np

from engine.kv.hashing import HASH_FUNCTIONS, extend_hashes, root_hash


def hashes_of(tokens: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(salt), np.array(tokens, np.int32), block_size)
    return hashes


def test_a_hash_covers_its_tokens_and_all_before_them() -> None:
    a, b = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len(a) == len(b) == 2 and not set(a) & set(b)
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == a[0]
    assert a[0] != a[1] and len(set(hashes_of([0] * 32))) == 8


def test_a_partly_filled_block_has_none() -> None:
    assert hashes_of([1, 2, 3]) == []
    assert len(hashes_of([1, 2, 3, 4, 5])) == 1


def test_salts_separate() -> None:
    tokens = [1, 2, 3, 4]
    assert hashes_of(tokens, "a") == hashes_of(tokens, "a")
    assert len({hashes_of(tokens, salt)[0] for salt in (None, "", "a", "b")}) == 4


def test_growing_in_steps_gives_the_same() -> None:
    tokens = np.arange(40, dtype=np.int32)
    hashes: list[bytes] = []
    for n in range(41):
        extend_hashes(hashes, root_hash(None), tokens[:n], 4)
    assert hashes == hashes_of(tokens.tolist())


def chain(algo: str = "xxhash", lora: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    digest = HASH_FUNCTIONS[algo]
    root = root_hash(None, lora, digest)
    extend_hashes(hashes, root, np.zeros(16, np.int32), 4, digest=digest)
    return hashes


def test_adapters_separate_and_are_no_salts() -> None:
    assert chain(lora="a") == chain(lora="a")
    assert len({chain(lora=lora)[0] for lora in (None, "", "a", "b")}) == 4
    assert root_hash("a") != root_hash(None, "a") and root_hash("ab", "c") != root_hash("b", "ca")


def test_sha256_is_sha256_over_the_same_bytes() -> None:
    root = hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + bytes(16)).digest()
    assert chain("sha256")[:2] == [first, hashlib.sha256(first + bytes(16)).digest()]
    assert len(chain("xxhash")[0]) == 16
