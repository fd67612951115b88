"""What `generate.py` reads and prints: prompts, text, figures, the trace file, the chat."""
