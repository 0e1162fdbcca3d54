"""The command line's own parts: flags, data files, prompts, journal and results."""
