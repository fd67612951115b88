"""What evaluate.py is made of: question sets, answers, losslessness, tables, pictures."""
