"""Kernels in C++ for bfloat16 on CPUs with AVX-512: what a forward does beside its matrix products.

`make compile` builds them, in seconds. They are optional: where they were not built, are older than their source,
or the CPU lacks the instructions, the torch code beside each call runs instead, and the log says so.
"""
