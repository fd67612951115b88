"""The names of the quantisation modes, without torch: options are judged by them before it is imported."""
from __future__ import annotations

MODES = ("int8", "w8a8", "int4", "w4a8", "fp8")
FOUR_BITS = ("int4", "w4a8")
MXFP4, MXFP4_GROUP = "mxfp4", 32  # of experts only, as files have it; nothing is rounded to it here
# The mode of what is sensitive beside them: heads and the lm_head.
BESIDE = {"int4": "int8", "w4a8": "w8a8", MXFP4: "w8a8"}
GROUPS = (32, 64, 128)
