"""Floor 4: the pages of the KV cache: how they are cut, counted, found again and given back. No torch."""
