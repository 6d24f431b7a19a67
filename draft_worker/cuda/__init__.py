"""The draft step on a CUDA device: Triton kernels and GEMMs over static tensors, one graph replay for a bucket."""
