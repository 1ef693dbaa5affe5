"""The engine: time and memory of plans under construction, compiled.

It works on arrays. `arrays.SearchProblem` has the options of a problem; search/anneal/search_space.py makes it.
`arrays.State` is one plan, with everything that follows from it. Changes update it in place.
The best plan is not copied. A log of the changes made since then leads back to it.

state: what a plan holds, and all that follows from it. trial: try a change and accept it, or place a shard.
memory, cost: bytes that devices lack, ms of a step. greedy and annealing, which choose changes, are in
search/anneal/compiled.

Nothing in these functions may allocate. They are compiled without numba's reference counts
(`_nrt=False`, an internal option of numba), because counting tripled the time of a trial.
Records are passed as pointers (pointers.py). Each function is compiled when it is first called.

Names in all files: `problem` is the SearchProblem, `state` the State; `problem_words` and `state_words` are the arrays
of words that have them. a, b, c and d are devices, s an item, h a host, g a group, y a shared kind, r and k runs, x an
exchange. An argument has its name in full where it has no other device, item or run beside it.
`was` is before a change, `then` after it.
"""
