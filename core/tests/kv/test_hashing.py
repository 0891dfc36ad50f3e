"""Names of prefixes."""

import hashlib

import numpy as np
from cores import LAYOUTS
from evictors import lru

from engine.kv.hashing import HASH_FUNCTIONS, MediaSpan, extend_hashes, root_hash
from engine.kv.manager import KVManager
from engine.kv.matching import Sequence
from engine.kv.reservation import Reservation


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


def chain(algo: str = "xxhash", lora: str | None = None, media: tuple[MediaSpan, ...] = ()) -> list[bytes]:
    hashes: list[bytes] = []
    digest = HASH_FUNCTIONS[algo]
    root = root_hash(None, lora, digest)
    extend_hashes(hashes, root, np.zeros(16, np.int32), 4, digest=digest, media=media)
    return hashes


def test_adapters_separate_and_are_no_salts() -> None:
    assert chain(lora="a") == chain(lora="a")
    assert len({chain(lora=lora)[0] for lora in (None, "", "a", "b")}) == 4
    assert root_hash("a") != root_hash(None, "a") and root_hash("ab", "c") != root_hash("b", "ca")


def test_media_separate_from_the_block_that_they_begin_in() -> None:
    plain, image = chain(), chain(media=(MediaSpan(5, 11, b"image"),))
    assert image[0] == plain[0] and image[1] != plain[1] and len(set(plain + image)) == 7
    other, moved = chain(media=(MediaSpan(5, 11, b"other"),)), chain(media=(MediaSpan(6, 11, b"image"),))
    assert len({plain[1], image[1], other[1], moved[1]}) == 4
    late = chain(media=(MediaSpan(12, 16, b"image"),))
    assert late[:3] == plain[:3] and late[3] != plain[3]
    both = chain(media=(MediaSpan(5, 6, b"one"), MediaSpan(6, 7, b"two")))
    assert both[1] not in (plain[1], image[1])


def test_media_hash_the_same_in_steps() -> None:
    media = (MediaSpan(5, 11, b"image"),)
    hashes: list[bytes] = []
    for n in range(17):
        extend_hashes(hashes, root_hash(None), np.zeros(n, np.int32), 4, media=media)
    assert hashes == chain(media=media)


def test_sha256_is_sha256_over_the_same_bytes() -> None:
    root = hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + bytes(16)).digest()
    assert chain("sha256")[:2] == [first, hashlib.sha256(first + bytes(16)).digest()]
    assert len(chain("xxhash")[0]) == 16


def test_equal_ids_of_other_media_share_no_partial_block() -> None:
    kv = KVManager(LAYOUTS["full"], num_pages=20, max_num_seqs=2, max_model_len=32, evictor=lru(20))
    for image, found in ((b"one", 0), (b"two", 4), (b"one", 8)):  # the block before the image is shared, then it too
        ids = np.zeros(10, np.int32)
        sequence = Sequence([], kv.root_hash(None), ids, (MediaSpan(5, 8, image),))
        step = Reservation(kv)
        hit = step.match(sequence, 9)
        assert hit.num_whole == found, image
        assert hit.num_tokens <= {0: 0, 4: 5, 8: 9}[found]
        step.enter(0, sequence, hit)
        step.chunk(0, hit.num_tokens, 10 - hit.num_tokens, sequence.hashes)
        step.allocate(1, [sequence], ids[None])
        kv.free_slot(0, 0, 10, [sequence], ids[None])
        kv.step_done(1)
        kv.check_integrity()
