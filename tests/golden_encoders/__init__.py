"""Tiny encoders, embedding models and rerankers, with what transformers finds for them."""
