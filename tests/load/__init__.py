"""Load generator for any OpenAI-compatible server: python -m tests.load --help."""
