"""The target worker: request state, the step loop, the target model's forward and the accept rule."""
