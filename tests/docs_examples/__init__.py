"""The worked examples of docs/extending.md; tests/test_docs_examples.py runs them."""
