"""Decoding: the static state, the step, the loop that replays it, compilation, the Python API."""
