"""The worked examples of docs/extending.md; tests/docs/test_docs_examples.py runs them."""
