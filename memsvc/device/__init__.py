"""Worker side of the arena, and the tensor code that both workers share. Needs torch."""
