"""Grammar `outlines`: structured outputs by Outlines ' finite automata."""
