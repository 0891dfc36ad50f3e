"""Floor 0: one child process: how it is started, spoken to, watched and ended; the codec of what crosses its border."""
