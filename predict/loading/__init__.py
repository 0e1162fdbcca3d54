"""From a directory to a network: config.json, checkpoints and their layouts, exported programs."""
