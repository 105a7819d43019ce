"""What trained the bundled code family: `python -m train.code_family.train`. RECIPE.md, corpus.json, losses.json and
evaluation.json record how, and with what result."""
