"""A KV cache that is too small for one request, of whatever groups: a typed error for it, and the others go on."""

from __future__ import annotations

import pytest
from cores import LAYOUTS
from steps import make_scheduler, request, run

from engine.types.request import FinishReason


@pytest.mark.parametrize("swap_pages", [0, 50])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_prompt_or_its_output_does_not_fit(layout: str, swap_pages: int) -> None:
    """The largest cache in which a request of 40 tokens does not fit, and others of 4 do."""
    probe = make_scheduler(LAYOUTS[layout])
    needed = probe.kv.pages_at_least(40)
    if needed == probe.kv.pages_at_least(4):
        pytest.skip("a window bounds what any request needs")
    settings = {"num_pages": needed, "swap_pages": swap_pages, "max_num_batched_tokens": 8}
    for prompt, outputs in ((40, 4), (6, 40)):
        scheduler = make_scheduler(LAYOUTS[layout], **settings)
        scheduler.add(request("small", [1, 2], max_tokens=2))
        scheduler.add(request("large", prompt, max_tokens=outputs))
        scheduler.add(request("after", [3, 4], max_tokens=2))
        ends = {output.request_id: output for output in run(scheduler) if output.finish_reason is not None}
        assert ends["small"].finish_reason is ends["after"].finish_reason is FinishReason.LENGTH
        error = ends["large"].error
        assert error is not None and error[0] == "kv_cache_too_small" and "'large'" in error[1]
        scheduler.check_integrity()
        fits = make_scheduler(LAYOUTS[layout], **{**settings, "num_pages": needed + 1})
        fits.add(request("large", min(prompt, 39), max_tokens=1 if prompt == 40 else 34))
        (end,) = (output for output in run(fits) if output.finish_reason is not None)
        assert end.finish_reason is FinishReason.LENGTH, "with one page more it does"
