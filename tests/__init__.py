"""Tests, load generator and benchmarks."""
