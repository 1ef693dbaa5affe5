"""Tables of a running job moved to another plan, and rows saved and loaded under any plan."""
