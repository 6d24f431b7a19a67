"""The one command: plans the memory, starts every process, restarts what dies, serves HTTP."""
