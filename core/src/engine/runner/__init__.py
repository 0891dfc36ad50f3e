"""The worker: builds the drivers that compute, and turns plans into tokens."""
