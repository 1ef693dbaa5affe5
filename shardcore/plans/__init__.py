"""Published plans: how they are stored, when they are replaced, and how they are re-planned."""
