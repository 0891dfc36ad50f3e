"""The reference attention on plain torch: drivers `torch`, and `torch_mla` for latent attention."""
