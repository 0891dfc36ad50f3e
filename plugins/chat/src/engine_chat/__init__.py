"""`engine chat`: a conversation in the terminal, or through a pipe."""
