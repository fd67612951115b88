"""Output modes of `generate.py`: statistics, JSON, comparison, traces, chat."""
