"""The target on a CUDA device: verify as one graph for each bucket, prompts eagerly, results read a step later."""
