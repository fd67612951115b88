"""The draft heads, and targets with delta nets, as modules. Definitions only."""
