"""Engine on TPUs: a platform with a worker of its own, in JAX. On any machine it runs on XLA's processor device."""
