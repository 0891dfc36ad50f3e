"""Stored responses: whose they are, how many, how long."""

from __future__ import annotations

from engine_server.responses.store import ResponseStore, StoredResponse


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(identity: str, text: str = "", before: tuple[dict[str, str], ...] = ()) -> StoredResponse:
    return StoredResponse({"id": identity, "output": [{"text": text}]}, before, [{"text": "asked"}])


def test_nobody_finds_what_another_has_stored() -> None:
    store = ResponseStore(10_000, 60)
    store.put("a", stored("r"))
    for stranger in ("b", None):
        assert store.get(stranger, "r") is None and not store.delete(stranger, "r")
    found = store.get("a", "r")
    assert found is not None and found.conversation == [{"text": "asked"}, {"text": ""}]
    assert store.delete("a", "r") and store.get("a", "r") is None and store.size == 0 and not store.delete("a", "r")


def test_the_oldest_of_who_holds_most_makes_way() -> None:
    store = ResponseStore(1000, 60)
    store.put("small", stored("s", "x" * 100))
    for i in range(20):
        store.put("large", stored(f"l{i}", "x" * 100))
        assert store.size <= 1000
    assert store.get("small", "s") is not None
    kept = [i for i in range(20) if store.get("large", f"l{i}") is not None]
    assert kept and kept == list(range(kept[0], 20))


def test_the_conversation_before_counts() -> None:
    store = ResponseStore(1000, 60)
    store.put(None, stored("r", before=({"text": "x" * 990},)))
    assert store.get(None, "r") is None and store.size == 0
    nothing = ResponseStore(0, 60)
    nothing.put(None, stored("r"))
    assert nothing.get(None, "r") is None


def test_one_in_the_place_of_another() -> None:
    store = ResponseStore(10_000, 60)
    store.put("a", stored("r", "x" * 500))
    store.put("a", stored("r", "y"))
    found, size = store.get("a", "r"), store.size
    assert found is not None and found.response["output"][0]["text"] == "y"
    assert store.delete("a", "r") and store.size == 0 < size < 500


def test_they_end() -> None:
    clock = Clock()
    store = ResponseStore(10_000, 60, clock)
    store.put("a", stored("first"))
    clock.now = 30
    store.put("a", stored("second"))
    clock.now = 60
    assert store.get("a", "first") is None and store.get("a", "second") is not None
    clock.now = 90
    assert store.get("b", "none") is None and store.size == 0, "also where another asks"
