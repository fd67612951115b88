"""Parts of evaluate.py: question sets, methods, answers, losslessness, the table, pictures."""
