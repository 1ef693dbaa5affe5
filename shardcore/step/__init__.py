"""What one training step of a plan does."""
