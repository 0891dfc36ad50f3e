"""Answers with blended documents, as `python -m tests.benchmarks.blended` compares them."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_blend")

from tests.benchmarks.blended import Agreement, compared, main, measure


def test_agreement_is_counted() -> None:
    answers, expected = [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 0, 4], [5, 6, 7, 8]], [[1, 2, 3, 4]] * 3 + [[5, 6, 7, 8]]
    assert compared(answers, expected, 0.5) == Agreement(0.5, 0.75, 0.625, 0.5)


def test_a_few_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """At ratio 1 the answers are full prefill's, and most of the prompts is reused at any."""
    small = ["--documents", "4", "--document-len", "40", "--output-len", "8"]
    assert main([*small, "--orders", "3", "--ratios", "0.15,1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    low, whole, _ = lines[2:]
    assert low[:2] == ["ratio", "0.15"] and float(low[2]) > 0.4
    assert whole == ["ratio", "1", low[2], "1.00", "1.00", "1.00"]


@pytest.mark.slow
def test_ten_documents_in_any_order() -> None:
    """What the operators' page says of the bundled model: blended answers are near those of full prefill, and far from
    those to the same documents in another order."""
    found = measure(orders=20, ratios=(0.15, 1.0))
    print(found)
    blended, exact, other = found["ratio 0.15"], found["ratio 1"], found["another order"]
    assert exact[1:] == (1.0, 1.0, 1.0) and blended.reused > 0.9
    assert blended.first > other.first and blended.leading > 2 * other.leading
