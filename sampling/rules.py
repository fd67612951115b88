"""The rules by which drafted nodes are accepted. They are named here apart, so that --help needs no torch."""

# What each rule does at temperature > 0; at temperature 0 all are `equal`.
RULES = {
    "equal": "gives the text of plain decoding (default)",
    "typical": "is Medusa's rule and LOSSY",
    "residual": "draws anew, for draft-model",
}
LOSSY = ("typical",)  # their text is not distributed as the target's
