"""Input and output of `generate.py`: text, figures, JSON, traces, chat."""
