"""Trains the embedded hybrid model. Nothing that serves imports it."""
