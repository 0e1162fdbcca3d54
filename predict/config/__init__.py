"""Frozen configs that everything is built from. Imports no Paddle."""
