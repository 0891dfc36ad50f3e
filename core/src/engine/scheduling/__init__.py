"""Floor 5: decides what each step computes, and what becomes of what it gave. No torch."""
