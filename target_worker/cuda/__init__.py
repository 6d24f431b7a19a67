"""The target on a CUDA device: blocks and few prompt rows as graphs, other prompts eagerly, results read a step later."""
