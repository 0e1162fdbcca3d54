"""Every operator twice: compiled, and plain Paddle, which it is compared with."""
