"""Published plans: where they are kept, what is decided about them, and how they are planned again."""
