"""Adapters of requests: what they add to linears (LoRA), and where it lies."""
