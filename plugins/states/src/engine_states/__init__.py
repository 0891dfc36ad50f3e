"""Layers with states of fixed size: convolutions, selective scans, Mamba's mixers and gated delta nets."""
