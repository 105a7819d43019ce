"""A server for clients of OpenAI and Anthropic, on one machine: `specker serve --help` (docs/serve.md)."""
