"""The allocator: frames, tree, requests and clients as plain data. No I/O, no tensors, no threads."""
