"""The draft heads as modules: EAGLE, Medusa, Hydra. Definitions only."""
