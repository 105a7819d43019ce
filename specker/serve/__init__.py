"""An OpenAI-compatible server for one machine: `specker serve --help` (docs/serve.md)."""
