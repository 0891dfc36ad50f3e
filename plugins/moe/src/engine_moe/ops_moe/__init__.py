"""Ops driver `moe`: who computes which token, and what comes of it."""
