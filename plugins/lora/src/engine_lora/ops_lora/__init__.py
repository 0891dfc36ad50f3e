"""Ops driver `lora`: what adapters add to linear layers, on plain torch."""
