"""Backends that compute a step, in PyTorch, C++ and Triton; quantized layers; targets sharded over ranks."""
