"""What the kernels of a gated delta net can do. No torch here: launch imports this file."""

MOST_PAGE = 64
"""Tokens of a page: all rows behind a page's edge are a tile of a program, and larger ones take minutes to compile."""
