"""Triton kernels. `device` says whether they can run; other files are imported only if they can."""
