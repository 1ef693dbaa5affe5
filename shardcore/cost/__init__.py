"""Cost models: what a step costs, predicted."""
