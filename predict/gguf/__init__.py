"""GGUF files: read as far as their headers, and seen as the files of a checkpoint's folder."""
