"""What one round is: state, drafter, LM head, constraints, graphs, verification and acceptance."""
