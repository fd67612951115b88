"""Modules of evaluate.py: question sets, methods, answers, losslessness check, results table."""
