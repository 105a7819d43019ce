"""The commands. `run.py` decodes prompts; `specker NAME` runs cache, calibrate, drafts, serve or view."""

COMMANDS = {  # modules of this folder -> what they do
    "cache": "list or remove what specker keeps on disk",
    "calibrate": "count the tokens of text, for vocabtrim and diffuspec",
    "drafts": "list the heads and drafts that are known for a target",
    "serve": "serve a model over the OpenAI API",
    "view": "show traces of --trace as one HTML page",
}
