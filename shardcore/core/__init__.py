"""The nouns of planning, the catalogs that they refer to, and errors.

types, topology, constraints, job   tables, plans, devices and problems
access_statistics, step_cost        accesses of a table, and costs of a step
links, tiers                        levels of links, and tiers of memory
catalog, payloads                   optimizers, precisions, and forms in which outputs and gradients travel
errors, validation                  errors, and checks that raise them
progress, gc_pause, jit             progress of long work, garbage collection and compiled code
extras, html                        packages beyond the core, and tables as HTML
"""
