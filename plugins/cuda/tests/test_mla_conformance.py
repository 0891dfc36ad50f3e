"""Driver `mla` through the suite of its point, in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import AttentionConformance


class TestTritonLatentAttention(AttentionConformance):
    driver, stand_in = "mla", "interpreted"
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
