"""Training a draft head: the text, the target's states on it, the losses, the loop, the model card.

`training.session` runs all of it for `train.py`.
"""
