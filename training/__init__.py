"""Training of draft heads: data, target features, losses, training loop, model card.

`training.session` runs it for `train.py`.
"""
