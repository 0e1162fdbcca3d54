"""Golden checkpoints of models with a state per request, and what transformers finds for them."""
