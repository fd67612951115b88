"""Our kernels for GPUs, in Triton: `here` says whether they run; the other files are imported if they do."""
