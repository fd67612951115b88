"""How a token is drawn from logits, and by which rule a drafted one is accepted."""
