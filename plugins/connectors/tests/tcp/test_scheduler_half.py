"""What the scheduler half decides, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.interfaces.kv_connector import Found, KVConnectorNeed, Pages
from engine.process import wire
from engine.types.parallel import Parallel
from engine_connectors.tcp.card import TCPConnector, TCPOptions
from engine_connectors.tcp.messages import ExchangeNews, ExchangeSection
from engine_connectors.tcp.scheduler_half import TCPScheduler

ASK = {"do_remote_decode": True}


def half(identity: bytes = b"same", tp: int = 1, **options: Any) -> TCPScheduler:
    context = SimpleNamespace(
        options=TCPOptions(**options),
        identity=identity,
        layout=SimpleNamespace(block_size=4),
        parallel=Parallel(tp=tp),
    )
    return TCPScheduler(context)


def request(params: dict[str, Any] | None, tokens: int = 18, name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer=params, num_prompt_tokens=tokens, num_loadable=(tokens - 1) // 4 * 4
    )


def pages(*ids: int, first: int = 0) -> list[Pages]:
    return [Pages(0, first, np.array(ids, np.int32))]


def section(one: TCPScheduler) -> ExchangeSection:
    found = one.plan_section()
    return ExchangeSection() if found is None else wire.decoder(ExchangeSection).decode(found)


def news(rank: int = 0, **told: Any) -> bytes:
    return wire.encode(ExchangeNews(rank=rank, **told))


def told_by(p: TCPScheduler, tokens: int = 18) -> dict[str, Any]:
    held = p.finished(request(ASK, tokens), pages(5, 6, 7, 8, 9))
    assert held.params is not None and held.seconds == 60.0
    return held.params


def test_a_prompt_is_handed_over():
    p, d = half(host="127.0.0.1", port=1234), half()
    told = told_by(p)
    assert told["remote_block_ids"] == [[5, 6, 7, 8]] and told["num_tokens"] == 16
    (offer,) = section(p).offers
    assert (offer.transfer, offer.address) == (told["remote_request_id"], "")
    asking = request(told, name="d")
    assert d.lookup(asking, 4) == Found(12, True)
    d.allocated(asking, pages(1, 2, 3, first=1), 4, 16)
    assert d.lookup(asking, 4) is None, "it is tried once"
    (fetch,) = section(d).fetches
    assert (fetch.request_id, fetch.transfer, fetch.address) == ("d", offer.transfer, "127.0.0.1:1234")
    assert fetch.pages[0].pages.tolist() == [1, 2, 3]
    assert d.take([news(fetched=["d"], failed=[3])]).loaded == ["d"]
    assert p.take([news(sent=[offer.transfer])]).sent == ["r"]
    assert p.take([news(sent=[offer.transfer])]).sent == []
    p.check_integrity()
    d.check_integrity()


def test_the_last_rank_ends_it():
    p, d = half(tp=2), half(tp=2)
    told = told_by(p)
    asking = request(told, name="d")
    assert d.lookup(asking, 0) == Found(16, True)
    d.allocated(asking, pages(1), 0, 16)
    assert d.take([news(0, fetched=["d"])]).loaded == []
    assert d.take([news(1, fetched=["d"])]).loaded == ["d"]
    name = told["remote_request_id"]
    assert p.take([news(0, sent=[name]), news(0, sent=[name])]).sent == []
    assert p.take([news(1, sent=[name])]).sent == ["r"]


def test_what_is_of_no_use_is_not_asked_for(caplog):
    told = told_by(half())
    assert half(identity=b"another").lookup(request(told), 0) is None
    assert "another model" in caplog.text
    assert half(role="prefill").lookup(request(told), 0) is None
    assert half().lookup(request(None), 0) is None
    assert half().lookup(request({"do_remote_prefill": True, "remote_block_ids": [1]}), 0) is None
    assert half(identity=b"another").finished(request(told), pages(1)).params is None
    d = half()
    assert d.lookup(request(told), 16) is None
    assert section(d).unwanted == [("127.0.0.1:14579", told["remote_request_id"], 1)]
    d = half()  # which has all of it, so that the core does not ask
    d.finished(request(told), pages(1, 2, 3, 4))
    assert len(section(d).unwanted) == 1
    assert half(role="decode").finished(request(ASK), pages(1)).params is None
    assert half().finished(request(ASK, tokens=3), pages(1)).params is None


def test_a_hold_that_has_run_out_is_withdrawn():
    p = half()
    name = told_by(p)["remote_request_id"]
    section(p)
    p.aborted("r")
    assert section(p).withdrawn == [name]
    assert p.take([news(sent=[name])]).sent == []


def test_an_aborted_load_is_cancelled_and_still_told_of():
    d = half()
    asking = request(told_by(half()), name="d")
    assert d.lookup(asking, 0) == Found(16, True)
    d.allocated(asking, pages(1), 0, 16)
    section(d)
    d.aborted("d")
    assert section(d).cancelled == ["d"]
    assert d.take([news(fetched=["d"], failed=[1])]).loaded == ["d"]


def test_a_push_is_told_of_as_it_is_computed():
    p, d = half(peers="g, h"), half()
    params = {**ASK, "push": True, "remote_request_id": "x", "remote_host": "h", "remote_port": 7}
    asking = request(params)
    p.allocated(asking, pages(1, 2, 3), 0, 11)
    (chunk,) = section(p).chunks
    assert (chunk.transfer, chunk.address, chunk.last) == ("x", "h:7", False)
    assert chunk.pages[0].pages.tolist() == [1, 2], "a block that is not whole"
    p.allocated(asking, pages(3, 4, 5, first=2), 11, 18)
    (chunk,) = section(p).chunks
    assert (chunk.pages[0].first, chunk.pages[0].pages.tolist()) == (2, [3, 4])
    held = p.finished(asking, pages(1, 2, 3, 4, 5))
    assert held.params is None and held.seconds
    (offer,) = section(p).offers
    assert offer.last and not offer.anew and offer.pages[0].pages.tolist() == [1, 2, 3, 4]
    room = request({"do_remote_prefill": True, "push": True, "remote_request_id": "x"}, name="d")
    assert d.lookup(room, 0) == Found(16, True)
    d.allocated(room, pages(9), 0, 16)
    assert section(d).fetches[0].address == ""
    d.finished(request(room.kv_transfer, name="e"), pages(9))
    assert section(d).unwanted == [("", "x", 1)]


def test_what_was_computed_in_another_order_is_read_anew():
    p = half()
    asking = request({**ASK, "follow": True, "remote_request_id": "x"})
    p.allocated(asking, pages(1, 2), 0, 8)
    assert len(section(p).chunks) == 1
    p.allocated(asking, pages(7, 8), 0, 8)  # its first pages were lost, or not what they should be
    p.allocated(asking, pages(3, 4, first=2), 8, 16)
    assert section(p).chunks == []
    assert p.finished(asking, pages(7, 8, 3, 4)).seconds
    (offer,) = section(p).offers
    assert offer.anew and offer.transfer == "x"
    p.check_integrity()


def test_who_follows_computes_itself_what_its_cache_has_by_now():
    d = half()
    params = {"do_remote_prefill": True, "follow": True, "remote_request_id": "x"}
    asking = request({**params, "remote_host": "127.0.0.1", "remote_port": 7}, name="d")
    assert d.lookup(asking, 4) == Found(12, True)
    d.allocated(asking, pages(5, first=4), 16, 18)  # the plan computes its last tokens
    assert section(d) == ExchangeSection()
    d.computed(asking, pages(1, 2, 3, 4), 16)
    assert section(d).unwanted == [("127.0.0.1:7", "x", 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "10.0.0.7"},
        {"remote_host": None},
        {"remote_host": ["127.0.0.1"]},
        {"remote_port": "x"},
        {"remote_port": 1 << 20},
        {"remote_request_id": None},
        {"remote_request_id": "half of a character: \ud800"},
        {"num_tokens": "all"},
    ],
)
def test_whom_a_client_names_is_not_believed(change, caplog):
    d = half()
    one = request({**told_by(half()), **change})
    assert d.lookup(one, 0) is None
    assert "--kv-connector.peers" in caplog.text
    d.finished(one, pages(1, 2, 3, 4))
    assert all(address == "127.0.0.1:14579" for address, *_ in section(d).unwanted)


def test_a_push_to_whom_a_client_names_or_by_a_name_that_is_taken_is_none(caplog):
    p = half()
    params = {**ASK, "push": True, "remote_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 7}
    p.allocated(request(params), pages(1, 2), 0, 8)
    assert section(p).chunks
    for bad in (params, {**params, "remote_host": "evil"}, {**ASK, "push": True}):
        other = request(bad, name="other")
        p.allocated(other, pages(3, 4), 0, 8)
        assert p.finished(other, pages(3, 4)).seconds == 0.0
        assert section(p) == ExchangeSection()
    assert caplog.text.count("--kv-connector.peers") == 3
    p.check_integrity()
    p.aborted("other")
    p.aborted("r")


def test_engines_of_this_machine_know_each_other_and_those_that_are_named():
    assert all(TCPOptions().knows(host) for host in ("127.0.0.1", "localhost", "::1"))
    away = TCPOptions(host="10.0.0.1", advertise="a", plain=True, peers="b,10.0.0.3")
    assert [host for host in ("10.0.0.1", "a", "b", "10.0.0.3", "", "127.0.0.1", "c") if away.knows(host)] == [
        "10.0.0.1",
        "a",
        "b",
        "10.0.0.3",
    ]


def test_an_address_that_others_reach_needs_a_key():
    with pytest.raises(ValidationError, match="key_file"):
        TCPOptions(host="0.0.0.0")
    for good in ({"host": "::1"}, {"host": "localhost"}, {"host": "0.0.0.0", "plain": True}, {"key_file": "k"}):
        TCPOptions(**good)


def test_pages_on_a_device_are_refused():
    need = {"page_bytes": 1, "swap_space": 0, "parallel": Parallel()}
    assert TCPConnector.unsupported(KVConnectorNeed(device="cpu", **need)) == []
    assert "cuda:0" in TCPConnector.unsupported(KVConnectorNeed(device="cuda:0", **need))[0]
