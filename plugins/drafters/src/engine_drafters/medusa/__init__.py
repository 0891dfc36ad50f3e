"""Drafter `medusa`: heads that guess several tokens from one state."""
