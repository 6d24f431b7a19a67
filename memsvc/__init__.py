"""memsvc: one process that owns every byte LLM serving needs per token or per request."""
