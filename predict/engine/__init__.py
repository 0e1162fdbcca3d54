"""Continuous batching: scheduler and block manager (no framework), runners, sampler, engine."""
