"""The one network: its description (spec), its inputs, its weights and its forward pass."""
