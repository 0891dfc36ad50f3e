"""Draft heads as models: EAGLE, EAGLE-3, Medusa."""
