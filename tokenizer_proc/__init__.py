"""The tokenizer process: prompts in as text, out as tokens; answers in as tokens, out as text."""
