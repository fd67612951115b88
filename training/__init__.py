"""Everything behind train.py: the text, what the target says about it, the losses, the loop, the curves, the
model card.
"""
