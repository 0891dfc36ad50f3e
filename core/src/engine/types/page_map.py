"""The pages of a KV cache at one moment, for monitors."""

from __future__ import annotations

import msgspec

MOST_HOLDERS = 255
"""What more holders than these are told as: a page has one byte."""


class PageMap(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the pages of one engine core's KV cache. The null page, which is never given out, is left out.

    Args:
        holders: uint8 [pages]; the page's reference count: how many sequences' block tables name it, `MOST_HOLDERS` at
            most. With prefix caching, requests that begin alike hold the same pages.
        cached: uint8 [pages]; 1 where the prefix cache can find the page's content, held or not.
    """

    holders: bytes
    cached: bytes
