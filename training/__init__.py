"""Training of draft heads: text, target states, losses, loop, model card.

`training.session` runs it for `train.py`.
"""
