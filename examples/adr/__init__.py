"""DRAFT (arXiv 2504.08207) with specker: architecture decision records from a retrieving, fine-tuned model. See
README.md."""
