"""The server: OpenAI's API over HTTP in front of an engine in a process of its own."""
