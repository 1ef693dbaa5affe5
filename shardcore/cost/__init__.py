"""Cost models: predict what a training step costs, in ms."""
