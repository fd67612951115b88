"""Sampling tokens from logits."""
