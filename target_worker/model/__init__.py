"""The target network: one decoder for the Llama, Qwen2 and Qwen3 families."""
