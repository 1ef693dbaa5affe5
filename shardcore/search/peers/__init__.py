"""Peers: other people's planners as sharders, reimplemented or, where installed, themselves."""
