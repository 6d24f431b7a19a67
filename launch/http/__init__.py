"""The front: OpenAI-compatible HTTP on one side, the tokenizer's link on the other."""
