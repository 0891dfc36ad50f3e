"""Driver `mla` through the suite of its point, in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import AttentionConformance
from engine_sdk.conformance.attention.latent_case import latent_form


class TestTritonLatentAttention(AttentionConformance):
    driver, stand_in = "mla", "interpreted"
    quick = (
        r"^(?!.*(rows\[float(16|32)|block_sizes\[(4|16|64)\]|several_ranks|sizes\[(64-64|24-8)\]|latent_heads\[[^1]|"
        r"forms_of_one_kind|without_lse))"
    )
    test_figure = None  # how fast the interpreter is says nothing of the driver

    @pytest.mark.slow
    def test_latent_ragged_batches(self) -> None:
        """Takes the interpreter a while."""
        super().test_latent_ragged_batches()

    @pytest.mark.slow
    def test_latent_what_some_queries_do_not_see(self) -> None:
        """This too."""
        super().test_latent_what_some_queries_do_not_see()

    @pytest.mark.slow
    def test_latent_what_some_queries_do_not_see_of_long_rows(self) -> None:
        """And this."""
        super().test_latent_what_some_queries_do_not_see_of_long_rows()

    @pytest.mark.slow
    def test_latent_long_and_many_rows(self) -> None:
        """So does this."""
        super().test_latent_long_and_many_rows()

    def test_latent_what_lies_between_queries(self) -> None:
        """Of short rows: those that are divided take the interpreter ten seconds."""
        self.unseen_latent(latent_form(), [[7], [0, 3, 4, 19], [12, 13, 40]], 1, [(1, 2), (1, 10), (2, 30)])

    @pytest.mark.slow
    def test_latent_what_lies_between_queries_of_long_rows(self) -> None:
        super().test_latent_what_lies_between_queries()
