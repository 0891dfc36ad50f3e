"""Bodies: imported only when chosen, with errors that name them."""

from __future__ import annotations

import pytest

from engine.plugin import Card, load_body
from engine.types.errors import ContractError, DriverImportError


def card(**attributes: object) -> type[Card]:
    return type("Mine", (Card,), attributes)


def test_body_and_halves(playground):
    playground.module("pg_body", "class Core: pass\nclass Worker:\n    class Inner: pass\n")
    mine = card(body="pg_body:Core", bodies={"worker": "pg_body:Worker.Inner"})
    assert playground.imported() == set()
    assert load_body(mine).__name__ == "Core"
    assert load_body(mine, "worker").__qualname__ == "Worker.Inner"


@pytest.mark.parametrize("half", [None, "core"])
def test_a_card_without_the_body_is_a_contract_error(half):
    with pytest.raises(ContractError, match="names no body"):
        load_body(card(), half)


def test_a_body_that_is_no_class_is_a_contract_error(playground):
    playground.module("pg_func", "def Body(): pass")
    with pytest.raises(ContractError, match="not a class"):
        load_body(card(body="pg_func:Body"))


def test_a_body_that_cannot_be_imported_names_driver_and_distribution(playground, candidate):
    playground.module("pg_bad", "raise OSError('libfoo.so: cannot open shared object file')")
    with pytest.raises(DriverImportError) as caught:
        load_body(card(body="pg_bad:Body"), candidate=candidate("attention", "fast", "pg_card:Card", "dist-fast"))
    assert (caught.value.driver, caught.value.distribution) == ("fast", "dist-fast 1.0")
    assert "OSError: libfoo.so" in caught.value.found and "pg_bad:Body" in caught.value.found
