"""What a written text means to its reader: its thoughts, texts and calls, and the grammars that give it such a form.

It reads texts as they grow and knows no engine: `Engine.chat`, the command line and the server stand on it."""
