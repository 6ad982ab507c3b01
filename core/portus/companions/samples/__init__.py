"""The samples of an epoch that each rank gets, and those left. Numbers only: no data, no torch.

An epoch has one sequence of samples, whatever the number of ranks. Each step takes the next ones of
it, so what was delivered is a prefix, a count. What is left can be dealt anew to any ranks.
"""
