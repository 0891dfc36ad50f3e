"""What several drivers build with: parsers' parts, facts of the host, random numbers, caches."""
