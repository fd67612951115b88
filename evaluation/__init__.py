"""Everything behind evaluate.py: the questions, the runs, losslessness, the tables, the pictures."""
