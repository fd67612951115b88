"""Our own products: C++ for CPUs, Triton for GPUs, quantised layers, and the modules that run on them."""
