"""The commands. `run.py` decodes prompts; `specker NAME` runs cache, calibrate, drafts, serve or view."""
