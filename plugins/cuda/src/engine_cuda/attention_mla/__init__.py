"""Driver `mla` of point `attention`: latent attention in Triton."""
