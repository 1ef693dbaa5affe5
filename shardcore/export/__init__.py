"""Export: plans in the form that training systems take, and theirs as ours."""
