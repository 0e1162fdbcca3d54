"""Tokenizer libraries behind one interface, one file per kind of file that is read."""
