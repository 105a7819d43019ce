"""What every command of the package has: flags made of dataclasses, exit codes, one line for an error, Ctrl-C."""
