"""Speech to text over HTTP, and what Whisper may write next."""
