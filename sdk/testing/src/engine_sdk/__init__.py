"""For authors of plugins: `engine_sdk.conformance` proves that a driver does what its interface says."""
