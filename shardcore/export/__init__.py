"""Export: plans in the form that training systems take, theirs as ours, and what they report of their tables."""
