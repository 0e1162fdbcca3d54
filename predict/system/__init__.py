"""The machine under everything: checked files and outputs, terminal, signals, memory, ranges."""
