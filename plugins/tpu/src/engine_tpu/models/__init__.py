"""The models of the JAX worker: cards, and one decoder that they all are a form of."""
