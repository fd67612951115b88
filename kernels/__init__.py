"""Backends that compute a step, in PyTorch, C++ and Triton; quantised layers; targets sharded over ranks."""
