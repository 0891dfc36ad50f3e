"""CacheBlend (Yao et al., EuroSys 2025): keys and values of chunks that are no prefix are reused."""
