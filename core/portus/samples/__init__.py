"""Which samples of an epoch each rank gets, and which are left. Numbers only: no data, no torch.

An epoch has one sequence of samples, whatever the number of ranks. Each step takes the next ones of
it, so what was delivered is how many: a prefix. What is left can be dealt anew to any ranks.
"""
