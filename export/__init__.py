"""Static models: the decoder of `predict`, traced into a program on disk."""
