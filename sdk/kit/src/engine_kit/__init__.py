"""What several plugins build with: parsers' parts, facts of the host, random numbers, caches, processes, the banner."""
