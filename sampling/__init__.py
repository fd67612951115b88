"""Drawing tokens from logits, and accepting drafted ones."""
